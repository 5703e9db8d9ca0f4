"""The command `plan`: vLLM's own flags in, a layout and its capacity out."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvcache_exporter.human_integer import parse_human_integer

if TYPE_CHECKING:
    from kvcache_exporter.kv_cache_spec import EngineConfig

_SKIP_LAYERS = "--kv-cache-dtype-skip-layers"
_REFUSED = 3


class _HumanInteger(click.ParamType):  # type: ignore[type-arg]  # generic only in newer versions of click
    """A whole number as vLLM takes it: `8192`, `8k` (thousands), `8K` (1024)."""

    name = "integer"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return parse_human_integer(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


def _with_dashes(flag: str) -> str:
    """The spelling of an option here: `block_size` is `block-size` to vLLM."""
    return flag.replace("_", "-")


class _PlanCommand(click.Command):
    """Takes a list after --kv-cache-dtype-skip-layers, as vLLM does; click knows only one value a flag."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        spread: list[str] = []
        in_list = False
        for arg in args:
            starts_list = _with_dashes(arg) == _SKIP_LAYERS
            if in_list and (arg.isdecimal() or arg == "sliding_window"):
                if spread[-1] != _SKIP_LAYERS:
                    spread.append(_SKIP_LAYERS)
            elif not starts_list:
                in_list = False
            spread.append(_SKIP_LAYERS if starts_list else arg)
            in_list = in_list or starts_list
        return super().parse_args(ctx, spread)


_INTEGER = _HumanInteger()


def _on_off(name: str, field: str, meaning: str) -> Callable[[Any], Any]:
    return click.option(f"--{name}/--no-{name}", field, default=True, show_default=True, help=meaning)


@click.command("plan", cls=_PlanCommand, context_settings={"token_normalize_func": _with_dashes})
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--tensor-parallel-size", "-tp", type=_INTEGER, default=1, show_default=True)
@click.option("--pipeline-parallel-size", "-pp", type=_INTEGER, default=1, show_default=True)
@click.option("--decode-context-parallel-size", "-dcp", type=_INTEGER, default=1, show_default=True)
@click.option("--dtype", default="auto", show_default=True, help="The dtype that the engine computes in.")
@click.option("--kv-cache-dtype", default="auto", show_default=True)
@click.option(_SKIP_LAYERS, multiple=True, metavar="LAYER...", help="Layers, or sliding_window, that keep the model's dtype.")
@click.option("--block-size", type=_INTEGER, help="[default: as the attention backend of the GPU wants it]")
@click.option("--max-model-len", type=_INTEGER, help="[default: the model's]")
@click.option(
    "--allow-long-max-model-len",
    is_flag=True,
    envvar="VLLM_ALLOW_LONG_MAX_MODEL_LEN",
    show_envvar=True,
    help="Take a longer one than the model's own, as vLLM does under the same variable.",
)
@click.option("--max-num-batched-tokens", type=_INTEGER, help="[default: vLLM's for the GPU]")
@click.option("--max-num-seqs", type=_INTEGER, help="Changes nothing about the cache; taken so that arguments can be pasted.")
@_on_off("enable-prefix-caching", "enable_prefix_caching", "Prefix caching: hybrids keep more states with it.")
@_on_off("async-scheduling", "async_scheduling", "Two batches under way: windows reserve more with it.")
@click.option(
    "--disable-hybrid-kv-cache-manager/--no-disable-hybrid-kv-cache-manager",
    "disable_hybrid_kv_cache_manager",
    help="Windows beside full attention keep every token.",
)
@click.option("--mamba-cache-dtype", default="auto", show_default=True)
@click.option("--mamba-ssm-cache-dtype", default="auto", show_default=True)
@click.option(
    "--speculative-config", metavar="JSON", help="""As for vLLM, such as '{"method":"mtp","num_speculative_tokens":1}'."""
)
@click.option("--gpu-memory-utilization", type=click.FloatRange(0, 1), help="Taken so that arguments can be pasted.")
@click.option("--kv-cache-memory-bytes", "--kv-bytes", "kv_bytes", type=_INTEGER, help="Memory for the cache on each rank.")
@click.option("--gpu", default="H100", show_default=True, help="Decides vLLM's defaults.")
@click.option("--length", "lengths", type=_INTEGER, multiple=True, help="Say what a request of so many tokens takes; repeatable.")
@click.option("--vllm-version", help="Rules of this version.  [default: 0.32]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def plan(model: Path, lengths: tuple[int, ...], kv_bytes: int | None, as_json: bool, **flags: Any) -> None:  # noqa: ANN401
    """Say what an engine will hold: MODEL is a config.json, its directory, or a model in a Hugging Face cache."""
    from kvcache_exporter.errors import SourceError, UnsupportedModelError
    from kvcache_exporter.model_config import parse_model_config
    from kvcache_exporter.plan import RefusedPlanError, make_plan, plan_as_json, plan_as_text
    from kvcache_exporter.sources.model_files import find_config_json, load_config_json, weight_bytes

    try:
        file = find_config_json(model)
        parsed = parse_model_config(load_config_json(file))
        speculation = _speculation(flags["speculative_config"])
        made = make_plan(
            parsed,
            _engine_config(flags, speculation),
            kv_bytes_per_rank=kv_bytes,
            draft=None if speculation.draft is None else parse_model_config(load_config_json(speculation.draft)),
            weight_bytes=weight_bytes(file.parent),
            lengths=lengths,
            allow_long_max_model_len=flags["allow_long_max_model_len"],
        )
    except SourceError as error:
        raise click.ClickException(str(error)) from error
    except (UnsupportedModelError, RefusedPlanError) as error:
        _refuse(str(error), as_json=as_json)
    click.echo(json.dumps(plan_as_json(made), indent=2) if as_json else plan_as_text(made))


def _engine_config(flags: dict[str, Any], speculation: _Speculation) -> EngineConfig:
    from kvcache_exporter.gpus import find_gpu
    from kvcache_exporter.kv_cache_spec.engine_config import NEWEST_VLLM_VERSION, EngineConfig, parse_vllm_version

    try:
        gpu = find_gpu(flags["gpu"])
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--gpu") from error
    version = NEWEST_VLLM_VERSION if flags["vllm_version"] is None else parse_vllm_version(flags["vllm_version"])
    if version is None:
        raise click.BadParameter(f"{flags['vllm_version']!r} is not a version such as 0.32.0", param_hint="--vllm-version")
    return EngineConfig(
        block_size=flags["block_size"],
        kv_cache_dtype=flags["kv_cache_dtype"],
        dtype=flags["dtype"],
        tensor_parallel_size=flags["tensor_parallel_size"],
        pipeline_parallel_size=flags["pipeline_parallel_size"],
        decode_context_parallel_size=flags["decode_context_parallel_size"],
        max_model_len=flags["max_model_len"],
        max_num_batched_tokens=flags["max_num_batched_tokens"],
        enable_prefix_caching=flags["enable_prefix_caching"],
        async_scheduling=flags["async_scheduling"],
        disable_hybrid_kv_cache_manager=flags["disable_hybrid_kv_cache_manager"],
        mamba_cache_dtype=flags["mamba_cache_dtype"],
        mamba_ssm_cache_dtype=flags["mamba_ssm_cache_dtype"],
        kv_cache_dtype_skip_layers=flags["kv_cache_dtype_skip_layers"],
        num_speculative_tokens=speculation.num_speculative_tokens,
        num_draft_layers=speculation.num_draft_layers,
        gpu_memory_bytes=gpu.memory_bytes,
        gpu_name=gpu.name,
        vllm_version=version,
    )


@dataclass(frozen=True)
class _Speculation:
    """What --speculative-config comes to: layers of the model's own, or a draft model."""

    num_speculative_tokens: int = 0
    num_draft_layers: int = 0
    draft: Path | None = None


def _speculation(text: str | None) -> _Speculation:
    if text is None:
        return _Speculation()
    try:
        config = json.loads(text)
        method, tokens = str(config.get("method", "draft_model")), int(config["num_speculative_tokens"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        message = f"{text!r} is not an object with method and num_speculative_tokens"
        raise click.BadParameter(message, param_hint="--speculative-config") from error
    if method.endswith("mtp"):
        return _Speculation(tokens, num_draft_layers=1)
    if method == "ngram":
        return _Speculation(tokens)
    if config.get("model") and method in ("draft_model", "eagle", "eagle3"):
        return _Speculation(tokens, draft=Path(config["model"]))
    message = f"what method {method!r} keeps in the cache is not known here; mtp, ngram, and a draft model by its path are"
    raise click.BadParameter(message, param_hint="--speculative-config")


def _refuse(reason: str, *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"refused": reason}, indent=2))
    else:
        click.echo(f"refused: {reason}", err=True)
    sys.exit(_REFUSED)
