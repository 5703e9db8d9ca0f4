"""The GPUs of each container, from the kubelet's pod-resources API: gRPC on a unix socket, which only this node's root may open.

The messages are those of version v1 of the API (Kubernetes documentation, "Monitoring device plugin resources"). They are
described here at run time, with only the fields that are read; protobuf skips all others.

grpcio and protobuf belong to the extra `kubelet`. A call imports them, so that this module can be imported without them.
"""

from __future__ import annotations

import functools
import os
import re
import socket as sockets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from kvcache_exporter.errors import SourceError
from kvcache_exporter.gpu_owners import ContainerGpus

if TYPE_CHECKING:
    import grpc
    from google.protobuf.message import Message

_METHOD = "/v1.PodResourcesLister/List"

# As a message on the wire: ListPodResourcesRequest has no fields.
_REQUEST = b""

# Name, number, and type (a message's name, or "string"); a "*" after the type means repeated.
_MESSAGES = {
    "ListPodResourcesResponse": (("pod_resources", 1, "PodResources*"),),
    "PodResources": (("name", 1, "string"), ("namespace", 2, "string"), ("containers", 3, "ContainerResources*")),
    "ContainerResources": (("name", 1, "string"), ("devices", 2, "ContainerDevices*")),
    "ContainerDevices": (("resource_name", 1, "string"), ("device_ids", 2, "string*")),
}

# The kubelet's own limit. gRPC's default of 4 MiB is too little for a node with many pods and memory zones.
_MAX_ANSWER_BYTES = 16 * 1024 * 1024

# `.shared` is how NVIDIA's device plugin may name GPUs that it shares; MIG instances have a resource for each of their profiles.
_GPU_RESOURCE = re.compile(r"nvidia\.com/(gpu|gpu\.shared|mig-.+)")

# One of several shares of a device: `GPU-...::3` of NVIDIA's device plugin (time slicing, MPS), `nvidia0/vgpu3` of GKE's.
_SHARE = re.compile(r"(.+)(?:::|/vgpu)[0-9]+")

_EXPLANATIONS = {
    "resource_exhausted": "its answer is too large, or it is asked too often",
    "unimplemented": "it does not offer version v1 of the API, which Kubernetes has had since 1.20",
}


class PodResources:
    """Asks the kubelet which containers of this node have which GPUs. Every failure is a SourceError.

    `socket` is mostly /var/lib/kubelet/pod-resources/kubelet.sock; `timeout_seconds` bounds each call as a whole.
    """

    def __init__(self, socket: Path, *, timeout_seconds: float) -> None:
        self._socket = socket
        self._timeout_seconds = timeout_seconds
        self._call: grpc.Future[bytes] | None = None

    def list(self) -> tuple[ContainerGpus, ...]:
        """Every container that has been given NVIDIA GPUs, in the kubelet's order, each with its devices once and in order.

        Devices are named as their device plugin names them, without the number of a share. That is a uuid (`GPU-...`, `MIG-...`)
        with NVIDIA's plugin. GKE's names the device file, as in `nvidia0`: the number there is the device's minor number, which
        is not NVML's index on every machine (NVIDIA/nvidia-docker#1432), and is therefore not taken for one.

        Raises SourceError: `not_installed`, `missing` (no socket), `no_permission`, `timeout`, `parse`, `cancelled` (closed
        meanwhile), or the lower-case name of another gRPC status. After any of them the next call starts anew.
        """
        try:
            return tuple(_containers(self._ask()))
        except ImportError as error:
            raise SourceError(
                "not_installed",
                f"the kubelet's pod-resources API needs grpcio and protobuf ({error}): install kvcache-exporter[kubelet]",
            ) from error

    def close(self) -> None:
        """End a call in flight, from any thread. Nothing stays open between calls."""
        call = self._call
        if call is not None:
            call.cancel()

    def _ask(self) -> bytes:
        import grpc

        # A new channel for each call: a kept one can cling to the socket of a kubelet that has been restarted since, or wait out
        # a backoff after it. Connection attempts are shared among channels unless the pool of subchannels is a channel's own.
        options = (("grpc.max_receive_message_length", _MAX_ANSWER_BYTES), ("grpc.use_local_subchannel_pool", 1))
        with grpc.insecure_channel(f"unix:{quote(str(self._socket.absolute()))}", options) as channel:
            # Decoded later: gRPC would report an answer that cannot be as its `internal`, and log a traceback.
            method = channel.unary_unary(_METHOD, bytes, bytes)
            call = self._call = method.future(_REQUEST, timeout=self._timeout_seconds)
            try:
                return call.result()
            except grpc.FutureCancelledError as error:
                raise SourceError("cancelled", f"the call to the kubelet at {self._socket} was cancelled") from error
            except grpc.RpcError as error:
                raise self._source_error(error.code(), error.details()) from error
            finally:
                self._call = None

    def _source_error(self, status: grpc.StatusCode, details: str | None) -> SourceError:
        reason = status.name.lower()
        if reason == "deadline_exceeded":
            return SourceError("timeout", f"the kubelet at {self._socket} gave no answer within {self._timeout_seconds:g} s")
        if reason == "unavailable" and (cause := self._why_no_connection()) is not None:
            return cause
        explanation = f"{_EXPLANATIONS[reason]}: " if reason in _EXPLANATIONS else ""
        words = " ".join((details or "").split()) or "no details"
        return SourceError(reason, f"the call to the kubelet at {self._socket} failed with {status.name}: {explanation}{words}")

    def _why_no_connection(self) -> SourceError | None:
        """What the system says to a connection, which gRPC has only as part of a text; None if that is nothing clear."""
        try:
            with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM) as probe:
                probe.setblocking(False)
                probe.connect(str(self._socket))
        except (FileNotFoundError, NotADirectoryError):
            return SourceError(
                "missing",
                f"there is no {self._socket}: this is no Kubernetes node, or the hostPath of its folder is not mounted here",
            )
        except PermissionError:
            return SourceError(
                "no_permission",
                f"user {os.geteuid()} may not open {self._socket}: the kubelet lets only root in, so run the exporter as user 0 "
                "(runAsUser: 0)",
            )
        except ConnectionRefusedError:
            return SourceError(
                "unavailable",
                f"nobody listens on {self._socket}: the kubelet is down, or has been restarted and the socket itself is mounted "
                "here in the place of its folder, which would follow it",
            )
        except OSError:
            return None
        return None


def _containers(answer: bytes) -> Iterator[ContainerGpus]:
    """The containers with GPUs in an encoded ListPodResourcesResponse. Raises SourceError (`parse`)."""
    from google.protobuf.message import DecodeError

    try:
        response: Any = _response_class().FromString(answer)
    except DecodeError as error:
        raise SourceError("parse", f"the kubelet's answer of {len(answer)} bytes is no list of pods: {error}") from error
    for pod in response.pod_resources:
        for container in pod.containers:
            ids = [
                device_id
                # One resource has several entries where its devices are on several NUMA nodes.
                for devices in container.devices
                if _GPU_RESOURCE.fullmatch(devices.resource_name)
                for device_id in devices.device_ids
            ]
            if ids:
                yield _container_gpus(pod.namespace, pod.name, container.name, ids)


def _container_gpus(namespace: str, pod: str, container: str, ids: Sequence[str]) -> ContainerGpus:
    shares = [_SHARE.fullmatch(device_id) for device_id in ids]
    devices = [device_id if share is None else share[1] for device_id, share in zip(ids, shares, strict=True)]
    return ContainerGpus(namespace, pod, container, tuple(dict.fromkeys(devices)), shared=any(shares))


@functools.cache
def _response_class() -> type[Message]:
    """ListPodResourcesResponse, in a pool of its own: another client of the kubelet in this process may describe it as well."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="pod_resources.proto", package="v1", syntax="proto3")
    for message_name, fields in _MESSAGES.items():
        message = file.message_type.add(name=message_name)
        for name, number, type_name in fields:
            field = message.field.add(name=name, number=number)
            field.label = kinds.LABEL_REPEATED if type_name.endswith("*") else kinds.LABEL_OPTIONAL
            if type_name.startswith("string"):
                field.type = kinds.TYPE_STRING
            else:
                field.type, field.type_name = kinds.TYPE_MESSAGE, f".v1.{type_name.removesuffix('*')}"
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("v1.ListPodResourcesResponse"))
