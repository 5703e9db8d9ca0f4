"""What is published of targets, and of the health of each source."""

from __future__ import annotations

from kvcache_exporter.families.family import Family
from kvcache_exporter.snapshot import TargetSnapshot


def _pod(target: TargetSnapshot) -> tuple[str, str, str]:
    """Namespace, pod and container; "" for what is not told, which is to Prometheus as if the label were not there."""
    namespace, pod, container = (*(target.pod or "").split("/"), "", "")[:3]
    return namespace, pod, container


TARGET_FAMILIES = (
    Family(
        "kvcache_target_info",
        "1; the address that this target is polled at, and its pod, where that is configured or found. The pod's labels are not "
        "called namespace and pod, which Prometheus gives to the exporter itself.",
        ("target", "url", "simulated", "vllm_namespace", "vllm_pod", "vllm_container"),
        lambda target, simulated: [((target.url, simulated, *_pod(target)), 1)],
    ),
    Family(
        "kvcache_engine_metrics_present",
        "1 when the page of the target held vLLM series, 0 when it answered without any (statistics off, or not an engine). "
        "Absent when it did not answer.",
        ("target",),
        lambda target, simulated: [((), None if target.read_at is None else float(bool(target.engines)))],
    ),
)

HEALTH_FAMILIES = (
    Family(
        "kvcache_up",
        "1 when the last try to read this source gave a reading, else 0: vllm is /metrics, vllm_models /v1/models, vllm_version "
        "/version, model_config the model's config.json, kubernetes the API that tells engines, nvml the GPUs of this machine, "
        "processes those that hold GPU memory, pod_resources the kubelet. Absent for a source that was never tried.",
        ("target", "source"),
        lambda health: [((), float(health.up))],
    ),
    Family(
        "kvcache_last_success_timestamp_seconds",
        "When this source last gave a reading (Unix seconds). Absent when it never did.",
        ("target", "source"),
        lambda health: [((), health.last_success_at)],
    ),
    Family(
        "kvcache_poll_duration_seconds",
        "How long the last try to read this source took.",
        ("target", "source"),
        lambda health: [((), health.duration_seconds)],
    ),
    Family(
        "kvcache_poll_errors_total",
        "Failed tries to read this source, and single samples or device calls without a usable value, by reason.",
        ("target", "source", "reason"),
        lambda health: [((reason,), number) for reason, number in health.errors.items()],
        is_counter=True,
    ),
)
