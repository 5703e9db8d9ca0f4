"""The pods of this node that run engines, from the Kubernetes API."""

from __future__ import annotations

from kvcache_exporter.sources.kubernetes.pod_watch import PodsReading, PodWatch
from kvcache_exporter.sources.kubernetes.pods_api import ApiServer, PodsApi, find_api_server

__all__ = ["ApiServer", "PodWatch", "PodsApi", "PodsReading", "find_api_server"]
