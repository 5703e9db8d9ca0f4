"""The flags of a vLLM engine that shape its cache, and vLLM's defaults for those that are not given."""

from __future__ import annotations

import re
from dataclasses import dataclass

GIB = 1024**3
H100_MEMORY_BYTES = 80 * GIB
LARGE_GPU_BYTES = 70 * GIB

NEWEST_VLLM_VERSION = (0, 32)


def parse_vllm_version(text: str | None) -> tuple[int, int] | None:
    """(major, minor) of a version such as `0.32.0+cpu`; None when it is no release number (a build from source)."""
    match = re.match(r"v?(\d+)\.(\d+)", text or "")
    # Builds from source without tags call themselves 0.1.dev….
    return None if match is None or ".dev" in str(text) else (int(match[1]), int(match[2]))


def is_large_gpu(name: str, memory_bytes: int) -> bool:
    """Whether vLLM gives this GPU its larger defaults (`vllm/engine/arg_utils.py`, `get_batch_defaults`)."""
    return memory_bytes >= LARGE_GPU_BYTES and not is_a100(name)


def is_a100(name: str) -> bool:
    """Whether it is an A100, of either size, which vLLM takes for a small GPU."""
    return "A100" in name.upper()


@dataclass(frozen=True)
class EngineConfig:
    """Flags by vLLM's names; None means that the flag is not given.

    `block_size` and the lengths are tokens, `gpu_memory_bytes` is one GPU's, `vllm_version` is (major, minor).
    `num_speculative_tokens` is 0 without speculation; `num_draft_layers` counts the multi-token-prediction layers that it adds.
    """

    block_size: int | None = None
    kv_cache_dtype: str = "auto"
    dtype: str = "auto"
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    max_model_len: int | None = None
    max_num_batched_tokens: int | None = None
    enable_prefix_caching: bool = True
    async_scheduling: bool = True
    disable_hybrid_kv_cache_manager: bool = False
    mamba_cache_dtype: str = "auto"
    mamba_ssm_cache_dtype: str = "auto"
    kv_cache_dtype_skip_layers: tuple[str, ...] = ()
    num_speculative_tokens: int = 0
    num_draft_layers: int = 0
    gpu_memory_bytes: int = H100_MEMORY_BYTES
    gpu_name: str = "H100"
    vllm_version: tuple[int, int] = NEWEST_VLLM_VERSION

    @property
    def batched_tokens(self) -> int:
        """`max_num_batched_tokens`, by default as the API server chooses it for the GPU (`vllm/engine/arg_utils.py`)."""
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        if self.gpu_memory_bytes >= 160 * GIB:
            return 16384
        return 8192 if is_large_gpu(self.gpu_name, self.gpu_memory_bytes) else 2048

    @property
    def max_in_flight_tokens(self) -> int:
        """Tokens that can be scheduled and not yet settled: a batch for each step under way (`vllm/config/vllm.py`).

        vLLM before 0.29 reserves for one batch only.
        """
        if self.vllm_version < (0, 29):
            return self.batched_tokens
        return self.batched_tokens * (self.pipeline_parallel_size + (1 if self.async_scheduling else 0))

    @property
    def is_blackwell(self) -> bool:
        """Whether the GPU is of the generation with other default attention backends (B100, B200, B300, GB200)."""
        name = self.gpu_name.upper()
        return any(model in name for model in ("B100", "B200", "B300"))
