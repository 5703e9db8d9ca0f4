"""The layers that vLLM's own class builds for a config.json, as a case for `tests/test_vllm_layers.py`.

    .venv-vllm/bin/python tests/vllm/layers.py ID config.json

The class is built without weights, on this machine's CPU; what has no backend there (latents with an index, some experts) fails
with vLLM's own error, and recurrent states of Mamba-2 come out in float32, as a CPU keeps them. Prints one JSON object: id,
config, and the layers as [kind, bytes of one token or of the state, window or chunk, number of layers].
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

from engine import VLLM_VERSION
from import_shim import write_import_shim

# Set for the second run, the one with the shim.
SHIMMED = "KVCACHE_EXPORTER_IMPORT_SHIM"

KINDS = {
    "FullAttentionSpec": "full_attention",
    "SlidingWindowSpec": "sliding_window",
    "ChunkedLocalAttentionSpec": "chunked_local_attention",
    "MLAAttentionSpec": "mla_attention",
    "CrossAttentionSpec": "cross_attention",
}


def built_specs(folder: Path) -> list[Any]:
    """The specs of all layers that keep a cache of their own, from a folder with config.json."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed.parallel_state import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    flags = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        load_format="dummy",
        enforce_eager=True,
        dtype="bfloat16",
        block_size=16,
        enable_prefix_caching=False,
    )
    config = flags.create_engine_config()
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        with set_default_torch_dtype(config.model_config.dtype), torch.device("meta"):
            initialize_model(config)
    layers = config.compilation_config.static_forward_context.values()
    own = [
        layer
        for layer in layers
        if isinstance(layer, AttentionLayerBase) and not getattr(layer, "kv_sharing_target_layer_name", None)
    ]
    return [spec for spec in (layer.get_kv_cache_spec(config) for layer in own) if spec is not None]


def described(spec: Any) -> tuple[str, float, int | None]:
    """Kind, bytes of one token or of the state, window or chunk of one of vLLM's specs."""
    from vllm.utils.torch_utils import get_dtype_size

    kind = type(spec).__name__
    if kind == "MambaSpec":
        sizes = zip(spec.shapes, spec.dtypes, strict=True)
        return "mamba", float(sum(prod(shape) * get_dtype_size(dtype) for shape, dtype in sizes)), None
    page_bytes = getattr(spec, "real_page_size_bytes", None) or spec.page_size_bytes
    window = getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None)
    return KINDS.get(kind, kind), page_bytes / spec.block_size, window


def print_case(name: str, file: Path) -> None:
    """Build the model and print the case."""
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(file, Path(folder) / "config.json")
        counted = Counter(described(spec) for spec in built_specs(Path(folder)))
    layers = sorted(([*what, number] for what, number in counted.items()), key=str)
    print(json.dumps({"id": name, "config": json.loads(file.read_text()), "layers": layers}))


def main() -> None:
    """Run this file again where vLLM can be imported."""
    name, file = sys.argv[1], Path(sys.argv[2])
    if SHIMMED in os.environ:
        print_case(name, file)
        return
    with tempfile.TemporaryDirectory() as shim:
        write_import_shim(Path(shim), VLLM_VERSION)
        environment = {**os.environ, "PYTHONPATH": shim, SHIMMED: "1"}
        again = subprocess.run([sys.executable, __file__, name, str(file)], env=environment, check=False)
    sys.exit(again.returncode)


if __name__ == "__main__":
    main()
