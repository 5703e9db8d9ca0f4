"""A real gRPC server in the place of the kubelet: its pod-resources API on a unix socket.

It is independent of the exporter's reading of that API: its messages are compiled by protoc from data/pod_resources.proto.
"""

from __future__ import annotations

import functools
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

PROTO = Path(__file__).with_name("data") / "pod_resources.proto"

# Addresses of unix sockets are at most 107 bytes long, and pytest's folders can be longer.
LONGEST_FOLDER = 80


@dataclass(frozen=True)
class Pod:
    """A pod and what its containers were given: for each, entries of a resource name and its device ids.

    Pod("ml", "vllm-0", {"engine": [("nvidia.com/gpu", ["GPU-0"])], "sidecar": []})
    """

    namespace: str
    name: str
    containers: Mapping[str, Sequence[tuple[str, Sequence[str]]]]


class KubeletServer:
    """Answers List on `socket`, in `folder`, for as long as the `with` block lasts. What it answers may be changed at any time.

    - `pods`: the pods to list
    - `delay_seconds`: wait before the answer
    - `status`: fail with this status in the place of an answer
    - `answer`: bytes to send in the place of a message
    - `calls`: how many calls came in
    """

    def __init__(self, folder: Path) -> None:
        self._own_folder = Path(tempfile.mkdtemp(prefix="kubelet-")) if len(str(folder)) > LONGEST_FOLDER else None
        self.socket = (self._own_folder or folder) / "kubelet.sock"
        self.pods: Sequence[Pod] = []
        self.delay_seconds = 0.0
        self.status: grpc.StatusCode | None = None
        self.answer: bytes | None = None
        self.calls = 0
        self._server: grpc.Server | None = None
        self._stopping = threading.Event()

    def __enter__(self) -> KubeletServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        if self._own_folder is not None:
            shutil.rmtree(self._own_folder)

    def start(self) -> None:
        """Listen on the socket, as a new file in the place of one that is there: so does the kubelet when it starts."""
        self.socket.unlink(missing_ok=True)
        self._stopping.clear()
        self._server = grpc.server(ThreadPoolExecutor(max_workers=4))
        service = messages().DESCRIPTOR.services_by_name["PodResourcesLister"]
        listing = grpc.unary_unary_rpc_method_handler(
            self._list, messages().ListPodResourcesRequest.FromString, lambda answer: answer
        )
        handler = grpc.method_handlers_generic_handler(service.full_name, {service.methods_by_name["List"].name: listing})
        self._server.add_generic_rpc_handlers((handler,))
        self._server.add_insecure_port(f"unix:{self.socket}")
        self._server.start()

    def stop(self) -> None:
        """End every connection and call; nothing listens any more, and the socket file is gone."""
        if self._server is not None:
            self._stopping.set()
            self._server.stop(grace=None).wait()
            self._server = None
        self.socket.unlink(missing_ok=True)

    def _list(self, _: Any, context: grpc.ServicerContext) -> bytes:
        self.calls += 1
        self._stopping.wait(self.delay_seconds)
        if self.status is not None:
            context.abort(self.status, "as the test wants it")
        return encode(self.pods) if self.answer is None else self.answer


def encode(pods: Sequence[Pod]) -> bytes:
    """A ListPodResourcesResponse on the wire, with every other field of the API filled in too."""
    response = messages().ListPodResourcesResponse()
    for pod in pods:
        pod_resources = response.pod_resources.add(name=pod.name, namespace=pod.namespace)
        for name, entries in pod.containers.items():
            container = pod_resources.containers.add(name=name, cpu_ids=[4, 5])
            container.memory.add(memory_type="memory", size=1 << 34).topology.nodes.add(ID=1)
            claim = container.dynamic_resources.add(class_name="net", claim_name="nic", claim_namespace=pod.namespace)
            claim.claim_resources.add(driver_name="net.example", pool_name="node-1", device_name="nic-0").cdi_devices.add(
                name="net.example/nic=0"
            )
            for resource, ids in entries:
                container.devices.add(resource_name=resource, device_ids=ids).topology.nodes.add(ID=1)
    return bytes(response.SerializeToString())


@functools.cache
def messages() -> Any:
    """The module that protoc makes of the API, compiled once for a test run."""
    with tempfile.TemporaryDirectory() as folder:
        # A process of its own: what grpc_tools warns about is not ours, and warnings are errors here.
        command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTO.parent}", f"--python_out={folder}", PROTO.name]
        subprocess.run(command, check=True, capture_output=True)
        name = f"{PROTO.stem}_pb2"
        spec = importlib.util.spec_from_file_location(name, Path(folder) / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module
