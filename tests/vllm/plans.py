"""What `kvcache-exporter plan` says of a model before it is served."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flags import CACHE_FLAGS


def planned(config: Path, *, kv_bytes: int | None = None, lengths: Sequence[int] = ()) -> dict[str, Any]:
    """The plan's JSON for the flags that every engine gets and so many bytes of cache."""
    command = [str(Path(sys.executable).with_name("kvcache-exporter")), "plan", str(config), "--json", *CACHE_FLAGS]
    # On a CPU vLLM has one batch under way (vllm/platforms/cpu.py).
    command += ["--no-async-scheduling"]
    command += [] if kv_bytes is None else ["--kv-bytes", str(kv_bytes)]
    for length in lengths:
        command += ["--length", str(length)]
    plan: dict[str, Any] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    return plan
