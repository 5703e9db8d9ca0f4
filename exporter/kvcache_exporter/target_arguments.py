"""The command line of an engine -> the settings of its target."""

from __future__ import annotations

from dataclasses import replace

from kvcache_exporter.config import TargetConfig
from kvcache_exporter.engine_args import EngineArgs

# One rank more or less changes every byte, and these have defaults that a hidden command line may override.
_PARALLEL_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "decode_context_parallel_size")
# They draft from the text so far (vLLM's `config/speculative.py`).
_METHODS_WITHOUT_LAYERS = ("ngram", "ngram_gpu", "suffix")
# What cannot be told of these changes the layout too.
_OF_THE_LAYOUT = (*_PARALLEL_SIZES, "dtype", "max_num_batched_tokens", "num_speculative_tokens")


def with_arguments(target: TargetConfig, args: EngineArgs, *, gpus: int | None = None) -> TargetConfig:
    """The target with what the engine's command line says.

    `gpus` is how many GPUs its container has, None where that is not told. What is not given is vLLM's default, but only if
    the whole command line is there to be read: a size of which that is not known goes to `unknown_arguments`, unless a single
    GPU leaves no choice.
    """
    unknown = {name: f"{_flag(name)} is {args.unknown[name]}" for name in _OF_THE_LAYOUT if name in args.unknown}
    for name in _PARALLEL_SIZES:
        if getattr(args, name) is None and name not in unknown and (reason := _hidden(args)) is not None:
            unknown[name] = f"{_flag(name)} may be {reason}"
        if gpus == 1:
            unknown.pop(name, None)
    draft_layers = _draft_layers(args)
    if draft_layers is None:
        unknown["num_speculative_tokens"] = (
            f"what speculation by {args.speculative_method or 'this model'} adds to the cache is not known"
        )
    return replace(
        target,
        tensor_parallel_size=args.tensor_parallel_size or 1,
        pipeline_parallel_size=args.pipeline_parallel_size or 1,
        decode_context_parallel_size=args.decode_context_parallel_size or 1,
        max_num_batched_tokens=args.max_num_batched_tokens,
        num_speculative_tokens=args.num_speculative_tokens,
        num_draft_layers=draft_layers,
        max_num_seqs=args.max_num_seqs,
        max_model_len=args.max_model_len,
        dtype=args.dtype or "auto",
        has_default_seats=_has_default_seats(args),
        unknown_arguments=tuple(unknown.values()),
    )


def _has_default_seats(args: EngineArgs) -> bool:
    """Whether it is sure that no argument says or changes max_num_seqs, as `--performance-mode` does."""
    told = {"max_num_seqs", "max_num_batched_tokens", "performance_mode"} & args.unknown.keys()
    return args.max_num_seqs is None and args.performance_mode is None and not told and _hidden(args) is None


def _hidden(args: EngineArgs) -> str | None:
    """Where arguments can be that are not seen; None when all are."""
    if args.config_file is not None:
        return f"in {args.config_file}"
    return None if args.is_vllm else "in the image"


def _draft_layers(args: EngineArgs) -> int | None:
    """Layers that speculation adds to the model's own; None for a draft model, which is not there to be looked at."""
    if args.num_speculative_tokens is None:
        return 0
    if args.speculative_method is not None and args.speculative_method.endswith("mtp"):
        return 1
    return 0 if args.speculative_method in _METHODS_WITHOUT_LAYERS else None


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
