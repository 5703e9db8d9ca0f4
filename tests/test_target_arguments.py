"""The command line of an engine as settings of its target, and what is left open where it does not tell."""

from __future__ import annotations

import pytest

from kvcache_exporter.config import TargetConfig
from kvcache_exporter.engine_args import read_engine_args
from kvcache_exporter.target_arguments import with_arguments

TARGET = TargetConfig("t", "http://t:8000")


def target(arguments: str, gpus: int | None = None) -> TargetConfig:
    return with_arguments(TARGET, read_engine_args(arguments.split()), gpus=gpus)


def test_settings_of_a_whole_command_line() -> None:
    found = target(
        "vllm serve m -tp 4 -pp 2 -dcp 2 --max-num-seqs 64 --max-num-batched-tokens 4096 --max-model-len 8192 --dtype half",
        gpus=8,
    )
    assert found == TargetConfig(
        "t",
        "http://t:8000",
        tensor_parallel_size=4,
        pipeline_parallel_size=2,
        decode_context_parallel_size=2,
        max_num_seqs=64,
        max_num_batched_tokens=4096,
        max_model_len=8192,
        dtype="half",
        num_draft_layers=0,
    )


def test_what_a_whole_command_line_does_not_have_is_the_default() -> None:
    assert target("vllm serve m") == TargetConfig("t", "http://t:8000", has_default_seats=True, num_draft_layers=0)


@pytest.mark.parametrize(
    ("arguments", "is_sure"),
    [
        ("vllm serve m -tp 2", True),
        ("vllm serve m --max-num-batched-tokens 512", True),
        ("vllm serve m --max-num-seqs 256", False),
        ("vllm serve m --max-num-seqs $(SEATS)", False),
        ("vllm serve m --max-num-batched-tokens $(TOKENS)", False),
        ("vllm serve m --performance-mode throughput", False),
        ("vllm serve m --performance-mode $(MODE)", False),
        ("vllm serve m --config engine.yaml", False),
        ("vllm serve m $EXTRA_ARGS", False),
        ("start.sh -tp 2", False),
    ],
)
def test_default_seats_are_taken_only_where_nothing_can_change_them(arguments: str, is_sure: bool) -> None:
    assert target(arguments, gpus=1).has_default_seats == is_sure


@pytest.mark.parametrize(
    ("arguments", "gpus", "unknown"),
    [
        ("vllm serve m --tensor-parallel-size $(TP)", 4, ("--tensor-parallel-size is $(TP)",)),
        ("vllm serve m --tensor-parallel-size $(TP)", 1, ()),
        ("vllm serve m --tensor-parallel-size $(TP) -tp 2", 4, ()),
        ("vllm serve m --dtype $(KIND)", 1, ("--dtype is $(KIND)",)),
        ("vllm serve m --max-num-seqs $(SEATS)", None, ()),
        (
            "vllm serve m --config engine.yaml -tp 2",
            2,
            ("--pipeline-parallel-size may be in engine.yaml", "--decode-context-parallel-size may be in engine.yaml"),
        ),
        ("vllm serve m --config engine.yaml", 1, ()),
        ("start.sh", 1, ()),
        (
            "start.sh",
            None,
            (
                "--tensor-parallel-size may be in the image",
                "--pipeline-parallel-size may be in the image",
                "--decode-context-parallel-size may be in the image",
            ),
        ),
        ("start.sh -tp 2 -pp 1 -dcp 1", 2, ()),
    ],
)
def test_what_cannot_be_told_is_named(arguments: str, gpus: int | None, unknown: tuple[str, ...]) -> None:
    assert target(arguments, gpus).unknown_arguments == unknown


@pytest.mark.parametrize(
    ("config", "tokens", "layers"),
    [
        ('{"method":"mtp","num_speculative_tokens":2}', 2, 1),
        ('{"method":"deepseek_mtp","num_speculative_tokens":1}', 1, 1),
        ('{"method":"ngram","num_speculative_tokens":4}', 4, 0),
    ],
)
def test_speculation_whose_layers_are_known(config: str, tokens: int, layers: int) -> None:
    found = target(f"vllm serve m -sc {config}")
    assert (found.num_speculative_tokens, found.num_draft_layers, found.unknown_arguments) == (tokens, layers, ())


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (
            '{"method":"eagle3","model":"d","num_speculative_tokens":2}',
            "what speculation by eagle3 adds to the cache is not known",
        ),
        ('{"model":"d","num_speculative_tokens":2}', "what speculation by this model adds to the cache is not known"),
        ('{"method":"mtp"}', '--num-speculative-tokens is {"method":"mtp"}'),
    ],
)
def test_speculation_by_a_draft_model_is_not_guessed(config: str, sentence: str) -> None:
    assert target(f"vllm serve m -sc {config}").unknown_arguments == (sentence,)
