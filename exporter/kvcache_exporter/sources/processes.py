"""The processes of this machine: which of those that hold GPU memory belong to which engine.

An engine in a container is found by the container's id, which is in the cgroup of all its processes. Others are found by the port
that they listen on: the process that listens is the API server, and the engine's workers are its children (`vllm serve`) or, with
several API servers, children of the parent that holds the socket too. Titles such as
`VLLM::EngineCore_DP1` and `VLLM::Worker_PP0_TP3` tell ranks (vLLM `v1/executor/multiproc_executor.py` and `v1/engine/core.py`,
`set_process_title`).
"""

from __future__ import annotations

import re
import socket
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from kvcache_exporter.errors import SourceError
from kvcache_exporter.gpu_owners import EnginePlace, EngineProcess

_TITLE = re.compile(r"\S+::(?:EngineCore|Worker)")
# The inode of the first PID namespace of a machine, a constant of Linux (include/linux/proc_ns.h, PROC_PID_INIT_INO).
_HOST_PID_NAMESPACE = "pid:[4026531836]"
_RANK = re.compile(r"_(DP|PP|TP)(\d+)")
_WILDCARDS = frozenset({"0.0.0.0", "::"})  # noqa: S104  # compared with, not bound


def sees_host_processes(namespace: Path = Path("/proc/self/ns/pid")) -> bool:
    """Whether the pids here are the host's, as NVML's are; in a container only with `hostPID`."""
    try:
        return str(namespace.readlink()) == _HOST_PID_NAMESPACE
    except OSError:
        return False


class ProcessTable:
    """Finds the engines behind pids. What was found for a process holds for its life and is not looked up again."""

    def __init__(self) -> None:
        self._listeners: dict[int, tuple[psutil.Process, frozenset[tuple[str, int]]]] = {}

    def engines_of(self, places: Mapping[str, EnginePlace], pids: Collection[int]) -> Mapping[str, tuple[EngineProcess, ...]]:
        """The processes among `pids` that belong to each target of this machine, given as name -> place.

        A target on another machine has no entry, and one of which no process is found an empty one. Raises SourceError
        (`no_permission`) when a process could be an engine's and its sockets may not be looked at.
        """
        containers = {place.container_id: name for name, place in places.items() if place.container_id is not None}
        local = _local_addresses()
        sockets = {
            name: listens_at
            for name, place in places.items()
            if place.container_id is None and (listens_at := _socket(place.url, local)) is not None
        }
        found: dict[str, list[EngineProcess]] = {name: [] for name in (*containers.values(), *sockets)}
        denied: list[int] = []
        self._forget_the_dead()
        for pid in sorted(pids):
            try:
                process = psutil.Process(pid)
                owners = _names_in_cgroup(pid, containers) or self._listeners_of(process, sockets)
                for name in owners:
                    found[name].append(_engine_process(process))
            except (psutil.AccessDenied, PermissionError):
                denied.append(pid)
            except (psutil.NoSuchProcess, FileNotFoundError):
                continue
        if denied and any(not processes for processes in found.values()):
            raise SourceError(
                "no_permission",
                f"the sockets of process {denied[0]}, which holds GPU memory, may not be looked at, so it cannot be told whether "
                "it is an engine's; run the exporter as the engine's user, or with CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH",
            )
        return {name: tuple(processes) for name, processes in found.items()}

    def _listeners_of(self, process: psutil.Process, sockets: Mapping[str, tuple[frozenset[str], int]]) -> list[str]:
        """The targets whose socket the process or one of its ancestors listens on."""
        if not sockets or not _shares_our_network(process.pid):
            return []
        listening = self._listening_in_family(process)
        return [name for name, listens_at in sockets.items() if _listens(listening, listens_at)]

    def _listening_in_family(self, process: psutil.Process) -> frozenset[tuple[str, int]]:
        """Addresses that the process or one of its ancestors listens on; of the ancestors, those that can be looked at."""
        addresses = set(self._listening(process))
        for ancestor in process.parents():
            try:
                addresses |= self._listening(ancestor)
            except psutil.AccessDenied:
                continue
        return frozenset(addresses)

    def _listening(self, process: psutil.Process) -> frozenset[tuple[str, int]]:
        known = self._listeners.get(process.pid)
        # Equal processes have the same pid and the same start; an answer of "none" may be of before it listened.
        if known is not None and known[0] == process and known[1]:
            return known[1]
        connections = process.net_connections("tcp") if hasattr(process, "net_connections") else process.connections("tcp")
        addresses = frozenset((one.laddr.ip, one.laddr.port) for one in connections if one.status == psutil.CONN_LISTEN)
        self._listeners[process.pid] = (process, addresses)
        return addresses

    def _forget_the_dead(self) -> None:
        self._listeners = {pid: known for pid, known in self._listeners.items() if known[0].is_running()}


def _shares_our_network(pid: int) -> bool:
    """Whether a port of this process is one of ours: in a container with a network of its own, 8000 is another 8000."""
    return Path(f"/proc/{pid}/ns/net").readlink() == Path("/proc/self/ns/net").readlink()


def _engine_process(process: psutil.Process) -> EngineProcess:
    """The process with the ranks of its title; what that leaves out, such as a worker's engine, is in those of its ancestors."""
    ranks: dict[str, int] = {}
    for one in (process, *process.parents()):
        ranks = {**_ranks_in_title(one), **ranks}
    return EngineProcess(process.pid, ranks.get("DP"), ranks.get("PP"), ranks.get("TP"))


def _ranks_in_title(process: psutil.Process) -> dict[str, int]:
    title = " ".join(process.cmdline()) or process.name()
    return {kind: int(rank) for kind, rank in _RANK.findall(title)} if _TITLE.match(title) else {}


def _names_in_cgroup(pid: int, containers: Mapping[str, str]) -> list[str]:
    """The target whose container the process is in. Every runtime puts the id into the name of the container's cgroup."""
    if not containers:
        return []
    cgroup = Path(f"/proc/{pid}/cgroup").read_text(encoding="utf-8")
    return [name for container_id, name in containers.items() if container_id in cgroup]


def _socket(url: str, local: Collection[str]) -> tuple[frozenset[str], int] | None:
    """The addresses and the port of a target on this machine; None for one elsewhere."""
    parts = urlsplit(url)
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        answers = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
    except (OSError, ValueError):
        return None
    addresses = frozenset(str(answer[4][0]) for answer in answers)
    return (addresses, port) if addresses & frozenset(local) else None


def _listens(listening: Iterable[tuple[str, int]], listens_at: tuple[frozenset[str], int]) -> bool:
    addresses, port = listens_at
    return any(at == port and (ip in addresses or ip in _WILDCARDS) for ip, at in listening)


def _local_addresses() -> frozenset[str]:
    return frozenset(address.address for card in psutil.net_if_addrs().values() for address in card)
