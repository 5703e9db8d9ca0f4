"""What is fixed when the simulated engine starts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineParameters:
    """What does not change while the engine runs; the defaults are Llama-3.1-8B in bfloat16 on one H100 with 80 GB.

    `num_gpu_blocks` counts the null block, as vLLM does; its default is the 53 GiB that such an engine has left for the cache at
    gpu_memory_utilization 0.92. A step takes `step_base_seconds` (the weights are read once), `step_seconds_per_prefill_token`
    (compute), and `step_seconds_per_sequence` for each decoding request (its cache is read once).

    Raises ValueError when a count is below 1, a step would take no time, or one request of max_model_len does not fit into the
    pool, which vLLM refuses at start (`v1/core/kv_cache_utils.py`).
    """

    block_size: int = 16
    num_gpu_blocks: int = 27_136
    max_num_seqs: int = 256
    max_model_len: int = 8192
    max_num_batched_tokens: int = 8192
    step_base_seconds: float = 0.007
    step_seconds_per_prefill_token: float = 0.000_025
    step_seconds_per_sequence: float = 0.000_08

    def __post_init__(self) -> None:
        counts = (self.block_size, self.max_num_seqs, self.max_model_len, self.max_num_batched_tokens)
        if min(counts) < 1:
            raise ValueError("block_size, max_num_seqs, max_model_len and max_num_batched_tokens are at least 1")
        if self.step_base_seconds <= 0 or min(self.step_seconds_per_prefill_token, self.step_seconds_per_sequence) < 0:
            raise ValueError("step_base_seconds is above 0 and the other step times are not below 0")
        if self.blocks_per_max_request > self.usable_blocks:
            raise ValueError(
                f"one request of max_model_len takes {self.blocks_per_max_request} blocks; the pool has {self.usable_blocks}"
            )

    @property
    def usable_blocks(self) -> int:
        """Blocks that requests can hold: all but block 0, the null block (`v1/core/block_pool.py`)."""
        return self.num_gpu_blocks - 1

    @property
    def blocks_per_max_request(self) -> int:
        """Blocks that one request of max_model_len tokens takes."""
        return self.blocks_for(self.max_model_len)

    def blocks_for(self, num_tokens: int) -> int:
        """Return the blocks that hold the KV of `num_tokens` tokens of one request."""
        return -(-num_tokens // self.block_size)
