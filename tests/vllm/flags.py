"""What every engine is started with, and planned with."""

from __future__ import annotations

BLOCK_SIZE = 32  # tokens; the smallest that vLLM takes on a CPU
MAX_MODEL_LEN = 4096
MAX_NUM_SEQS = 32
MAX_NUM_BATCHED_TOKENS = 2048

# As `vllm serve` and `kvcache-exporter plan` both take them.
CACHE_FLAGS = (
    *("--dtype", "bfloat16", "--block-size", str(BLOCK_SIZE), "--max-model-len", str(MAX_MODEL_LEN)),
    *("--max-num-seqs", str(MAX_NUM_SEQS), "--max-num-batched-tokens", str(MAX_NUM_BATCHED_TOKENS)),
)
