"""The exceptions of this package.

KVCacheExporterError
├── ConfigError             the exporter's own configuration cannot be used
├── UnsupportedModelError   the KV-cache layout of a model is not known
└── SourceError             a source (engine, GPU, file) gave no usable reading
"""

from __future__ import annotations

from collections.abc import Sequence


class KVCacheExporterError(Exception):
    """Base of every error that this package raises on purpose; `str()` is one sentence for the user."""


class ConfigError(KVCacheExporterError):
    """The configuration cannot be used.

    `problems` holds one sentence for each thing that is wrong, in the order of the file.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


class UnsupportedModelError(KVCacheExporterError):
    """The cache layout of this model is not known, so no bytes may be stated for it.

    `field` is the config.json field that decides it, `value` what the file says there.
    """

    def __init__(self, message: str, *, field: str, value: object) -> None:
        super().__init__(message)
        self.field = field
        self.value = value


class SourceError(KVCacheExporterError):
    """A source gave no usable reading.

    `reason` is one of few fixed words, since it becomes the `reason` label of `kvcache_poll_errors_total`:
    `timeout`, `connection`, `http_status`, `unauthorized`, `redirect`, `body_too_large`, `not_an_exposition`, `parse`,
    `invalid_sample`, `missing`, `unsupported_model`, `unknown_arguments`, `not_told`, `no_permission`, `hung`, `not_installed`,
    or the lower-case name of NVML's error code, or of the kubelet's gRPC status. `expired` never gets there.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
