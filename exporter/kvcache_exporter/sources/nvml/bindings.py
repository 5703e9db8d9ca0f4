"""Which package the module `pynvml` is of: two on PyPI install one of that name, and only NVIDIA's own is kept up to date."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, packages_distributions, version

_PACKAGE = "nvidia-ml-py"


def describe_bindings() -> str:
    """Name and version of the package that reads NVML, with a warning where another one has put its module in that place."""
    try:
        ours = f"{_PACKAGE} {version(_PACKAGE)}"
    except PackageNotFoundError:
        ours = f"{_PACKAGE} is not installed"
    others = sorted(set(packages_distributions().get("pynvml", ())) - {_PACKAGE})
    return f"{ours}; uninstall {', '.join(others)}, which has a module of the same name" if others else ours
