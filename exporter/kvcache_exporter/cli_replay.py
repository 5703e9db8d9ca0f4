"""The command `replay`: a capture in, what `serve` would have said out, as JSON lines."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from kvcache_exporter.config import Config
    from kvcache_exporter.replay import Subject

# A file of another kind is one complaint a line.
_MOST_PROBLEMS = 10


@click.command("replay")
@click.argument("capture", type=click.Path(path_type=Path))
@click.option(
    "--engine",
    "engine_path",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="JSON object with what no page tells, named as in the configuration: max_num_seqs, max_model_len, and model_config (or "
    "kv_cache_bytes_per_token).",
)
@click.option(
    "--config",
    "config_path",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="The YAML file that `serve` runs with; what --engine says comes first.",
)
@click.option("--target", metavar="NAME", help="Which target, where the file or the capture has several.")
@click.option(
    "--interval", type=click.FloatRange(min=0), metavar="SECONDS", help="Take pages at least this far apart.  [default: all]"
)
@click.option(
    "--window",
    type=click.FloatRange(min=1),
    metavar="SECONDS",
    help="How far back the requests are looked at that tell what a typical one is.  [default: of --config, else 300]",
)
def replay(
    capture: Path,
    engine_path: Path | None,
    config_path: Path | None,
    target: str | None,
    interval: float | None,
    window: float | None,
) -> None:
    """Work out again what the exporter said, or would have said, about pages that were recorded.

    CAPTURE is a file of `serve --record`, or JSON lines of {"t": seconds, "metrics": page}. Each engine on a page gives a line
    with `t`, `engine`, `slots` (typical requests that still fit), `exhaustion_seconds`, and every metric of the engine without
    `kvcache_` in front. What is not known is absent, and infinity is 1e999. Lines begin with the first page at which `slots` is
    known.
    """
    from kvcache_exporter.capture import read_capture
    from kvcache_exporter.config import Config
    from kvcache_exporter.errors import ConfigError, SourceError
    from kvcache_exporter.replay import Replay

    if engine_path is None and config_path is None:
        raise click.UsageError("give --engine FILE, --config FILE, or both: no page tells all that slots depend on")
    problems = _Problems(capture)
    try:
        config, subject = _settings(engine_path, config_path, target)
        replayed = Replay(
            subject,
            request_lengths=() if config is None else config.request_lengths,
            window_seconds=window or (Config if config is None else config).window_seconds,
            interval_seconds=interval or 0.0,
            only_target=target,
            on_problem=problems.say,
        )
        if not _print(replayed.lines(read_capture(capture, problems.say))):
            return
    except ConfigError as error:
        _refuse(*error.problems)
    except SourceError as error:
        _refuse(str(error))
    problems.say_how_many_more()
    if not replayed.pages:
        there = "" if target is None or target in replayed.targets else f" of target {target!r}"
        others = f"; it has pages of {', '.join(replayed.targets)}" if there and replayed.targets else ""
        _refuse(f"{capture}: no page{there} that can be read{others}")
    summary = replayed.summary()
    if summary is not None:
        click.echo(f"{capture}: {summary}", err=True)


def _settings(engine_path: Path | None, config_path: Path | None, name: str | None) -> tuple[Config | None, Subject]:
    from kvcache_exporter.config import load_config
    from kvcache_exporter.errors import ConfigError
    from kvcache_exporter.replay import Subject, subject_of_file

    if config_path is None:
        return None, subject_of_file(Path(str(engine_path)))
    config = load_config(config_path)
    targets = [target for target in config.targets if name in (None, target.name)]
    if len(targets) != 1:
        what = f"no target is called {name!r}" if name is not None else "there are several targets: say which by --target"
        raise ConfigError([f"{config_path}: {what}; it has {', '.join(target.name for target in config.targets)}"])
    return config, Subject(targets[0]) if engine_path is None else subject_of_file(engine_path, targets[0])


def _print(lines: Iterable[str]) -> bool:
    """Print each line as it comes; False when whoever reads them, such as `head`, has seen enough."""
    try:
        for line in lines:
            click.echo(line)
    except BrokenPipeError:
        # What is still in the buffer goes nowhere, or the interpreter complains about it at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False
    return True


class _Problems:
    """Says the first few problems of a file, and counts the rest."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._number = 0

    def say(self, sentence: str) -> None:
        self._number += 1
        if self._number <= _MOST_PROBLEMS:
            click.echo(f"{self._file}: {sentence}", err=True)

    def say_how_many_more(self) -> None:
        if self._number > _MOST_PROBLEMS:
            click.echo(f"{self._file}: {self._number - _MOST_PROBLEMS} more like these", err=True)


def _refuse(*sentences: str) -> None:
    for sentence in sentences:
        click.echo(sentence, err=True)
    sys.exit(2)
