"""`kvcache-exporter replay`: a capture in, what the exporter says of it out."""

from __future__ import annotations

import gzip
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvcache_exporter.capture import SUFFIX
from kvcache_exporter.cli import main
from kvcache_exporter.families import ENGINE_FAMILIES
from kvcache_exporter.replay import _as_json
from lab import LLAMA_8B, Upstream, free_port, models_answer, wait_until

SERIES = Path(__file__).parents[2] / "shared" / "captures" / "series"
ENGINE: Mapping[str, Any] = {"block_size": 16, "max_num_seqs": 8, "max_model_len": 4096, "bytes_per_token": 512}
NAMES = {family.name.removeprefix("kvcache_") for family in ENGINE_FAMILIES}

needs_series = pytest.mark.skipif(not SERIES.is_dir(), reason="the folder ../shared/captures/series is not here")


def page(finished: int = 0, *, usage: float = 0.25, running: int = 2, engines: Sequence[str] = ("0",)) -> str:
    """A page of engines that have finished so many requests of 100 prompt and 50 output tokens each."""
    lines = []
    for engine in engines:
        own = f'{{engine="{engine}",model_name="m"}}'
        lines += [
            f"vllm:kv_cache_usage_perc{own} {usage}",
            f"vllm:num_requests_running{own} {running}",
            f"vllm:num_requests_waiting{own} 0",
            f"vllm:prompt_tokens_total{own} {100 * (finished + running)}",
            f"vllm:generation_tokens_total{own} {50 * finished + 20 * running}",
            f'vllm:request_success_total{{engine="{engine}",model_name="m",finished_reason="stop"}} {finished}',
            f'vllm:cache_config_info{{engine="{engine}",block_size="16",num_gpu_blocks="{1001 * len(engines)}",'
            'cache_dtype="auto",kv_cache_memory_bytes="1"} 1',
        ]
        for name, bounds, value in (
            ("request_prompt_tokens", (50, 100, 200), 100),
            ("request_generation_tokens", (20, 50, 100), 50),
            ("time_to_first_token_seconds", (0.1, 1), 0.5),
        ):
            count = finished + (running if "first" in name else 0)
            label = f'engine="{engine}",model_name="m"'
            lines += [f'vllm:{name}_bucket{{{label},le="{bound}"}} {count * (value <= bound)}' for bound in bounds]
            lines += [f'vllm:{name}_bucket{{{label},le="+Inf"}} {count}', f"vllm:{name}_sum{own} {value * count}"]
    return "\n".join(lines) + "\n"


def poll(t: float, body: str | None = None, **more: object) -> str:
    return json.dumps({"t": t, "metrics": page(round(t)) if body is None else body, **more})


@pytest.fixture
def capture(tmp_path: Path) -> Path:
    return tmp_path / f"a{SUFFIX}"


def write(file: Path, *lines: str) -> Path:
    text = "".join(f"{line}\n" for line in lines).encode()
    file.write_bytes(gzip.compress(text) if file.name.endswith(".gz") else text)
    return file


def engine_file(folder: Path, **more: Any) -> Path:
    file = folder / "engine.json"
    file.write_text(json.dumps({**ENGINE, **more}))
    return file


def refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def strictly(text: str) -> dict[str, Any]:
    """A line as a strict parser reads it; every key is one that is documented, and no value is null."""
    line: dict[str, Any] = json.loads(text, parse_constant=refuse_constant)
    assert list(line)[:2] == ["t", "engine"]
    assert line.keys() <= {"t", "engine", "slots", *NAMES}
    for value in line.values():
        for number in value.values() if isinstance(value, dict) else (value,):
            assert isinstance(number, (int, float, str))
            assert not isinstance(number, bool)
            assert number == number
    return line


def run(capture: Path, *options: str | Path) -> tuple[list[dict[str, Any]], list[str], int]:
    """(lines, sentences, exit status)."""
    result = CliRunner().invoke(main, ["replay", str(capture), *map(str, options)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return [strictly(line) for line in result.stdout.splitlines()], result.stderr.splitlines(), result.exit_code


def replay(capture: Path, *options: str | Path, **engine: Any) -> tuple[list[dict[str, Any]], list[str], int]:
    return run(capture, "--engine", engine_file(capture.parent, **engine), *options)


def test_each_page_gives_a_line_once_a_typical_request_is_known(capture: Path) -> None:
    write(capture, *(poll(5 * number, page(max(0, number - 2), running=2 if number > 1 else 0)) for number in range(10)))
    lines, sentences, status = replay(capture)
    assert status == 0
    assert len(lines) == 8
    assert lines[-1]["t"] == 45
    assert [line["t"] for line in lines] == list(range(lines[0]["t"], 50, 5))
    assert all(line["engine"] == "0" and isinstance(line["slots"], int) for line in lines)
    assert sentences == [f"{capture}: 10 pages read; {10 - len(lines)} pages before slots were known"]
    last = lines[-1]
    assert last["slots"] == last["remaining_request_slots"]["typical"] == 6
    assert last["capacity_blocks"] == 1000
    assert last["bytes_per_token"] == 512
    assert last["requests_waiting"] == {"unknown": 0}
    assert last["request_length_tokens"]["max"] == 4096
    assert list(last)[2:4] == ["slots", "exhaustion_seconds"]


def test_infinity_is_a_number_of_json() -> None:
    text = _as_json({"t": 1.5, "exhaustion_seconds": math.inf, "a b": {'"': -math.inf, "Infinity": 0}})
    assert text == '{"t": 1.5, "exhaustion_seconds": 1e999, "a b": {"\\"": -1e999, "Infinity": 0}}'
    assert json.loads(text, parse_constant=refuse_constant)["exhaustion_seconds"] == math.inf


def test_several_engines_of_a_page_give_a_line_each(capture: Path) -> None:
    write(capture, *(poll(5 * n, page(n, engines=("0", "1"))) for n in range(1, 9)))
    lines, _, _ = replay(capture)
    assert [(line["t"], line["engine"]) for line in lines[-4:]] == [(35, "0"), (35, "1"), (40, "0"), (40, "1")]
    assert lines[-1]["capacity_blocks"] == 1000


def test_pages_at_least_so_far_apart(capture: Path) -> None:
    jitter = (0, 0.01, -0.01)
    write(capture, *(poll(n + jitter[n % 3], page(n)) for n in range(1, 61)))
    lines, _, _ = replay(capture, "--interval", "5")
    times = [line["t"] for line in lines]
    assert {round(b - a) for a, b in pairwise(times)} == {5}
    assert len(replay(capture)[0]) > 4 * len(lines)


def test_failed_polls_and_pages_that_are_none_give_no_line(capture: Path) -> None:
    write(
        capture,
        *(poll(n, page(n)) for n in range(1, 6)),
        json.dumps({"t": 6, "status": -1}),
        json.dumps({"t": 7, "status": 503, "body": "starting"}),
        poll(8, "<html>"),
        poll(9, page(9)),
        poll(10, "go_goroutines 1\n"),
        poll(11, page(11)),
    )
    lines, sentences, status = replay(capture)
    assert status == 0
    assert [line["t"] for line in lines[-3:]] == [5, 9, 11]
    assert (
        sentences[0] == f"{capture}: line 8: line 1 of the page is not a Prometheus sample: '<html>'; the whole page is dropped"
    )
    assert sentences[-1].startswith(f"{capture}: 8 pages read; 3 polls without a page that can be read")


def test_a_restart_of_the_clock_begins_anew(capture: Path) -> None:
    write(capture, *(poll(1000 + n, page(n)) for n in range(1, 9)), *(poll(n, page(n)) for n in (1, 1, 2, 3)))
    lines, sentences, _ = replay(capture)
    assert lines[-1]["t"] == 3
    assert sentences[0] == f"{capture}: line 9 is 1007 s earlier than the poll before it: history begins anew"
    assert sentences[1] == f"{capture}: line 10 has the time of the poll before it: passed over"


def test_broken_lines_are_sentences_and_the_rest_goes_on(capture: Path) -> None:
    write(capture, *(poll(n, page(n)) for n in range(1, 6)), "{", "", "null", *(poll(n, page(n)) for n in range(6, 9)))
    lines, sentences, status = replay(capture)
    assert (status, lines[-1]["t"]) == (0, 8)
    assert sentences[:2] == [f"{capture}: line 6 is not JSON, or not all of it", f"{capture}: line 8 is not an object"]


@pytest.mark.parametrize("text", ["", "hello\n" * 50, '{"t": 1, "status": -1}\n', '{"t": 1, "metrics": "<html>"}\n'])
def test_no_page_that_can_be_read_is_a_failure(tmp_path: Path, text: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(text)
    lines, sentences, status = replay(file)
    assert (lines, status) == ([], 2)
    assert sentences[-1] == f"{file}: no page that can be read"
    assert len(sentences) <= 12
    if text.startswith("hello"):
        assert sentences[-2] == f"{file}: 40 more like these"


def test_an_engine_of_which_no_request_is_known_is_no_failure(capture: Path) -> None:
    write(capture, *(poll(n, page(0, running=0, usage=0)) for n in range(5)))
    lines, sentences, status = replay(capture)
    assert (lines, status) == ([], 0)
    assert sentences[0].startswith(f"{capture}: 5 pages read; 5 pages before slots were known, so none was shown")


def test_several_targets(capture: Path) -> None:
    write(capture, *(poll(n, page(n, running=1 + r), target=f"t{r}") for n in range(1, 9) for r in range(2)))
    _, sentences, status = replay(capture)
    assert (sentences, status) == (["the capture is of several targets, t0, t1 among them: say which by --target"], 2)
    lines, _, status = replay(capture, "--target", "t1")
    assert (status, lines[-1]["requests_running"]) == (0, 2)
    _, sentences, status = replay(capture, "--target", "t2")
    assert status == 2
    assert sentences == [f"{capture}: no page of target 't2' that can be read; it has pages of t0, t1"]


def test_settings_of_the_configuration(capture: Path, tmp_path: Path) -> None:
    write(capture, *(poll(5 * n, page(n)) for n in range(1, 9)))
    config = tmp_path / "config.yml"
    config.write_text(
        "request_lengths: [2048]\n"
        "targets:\n"
        "- {name: a, url: 'http://a:1', max_num_seqs: 3, max_model_len: 4096, kv_cache_bytes_per_token: 512}\n"
        "- {name: b, url: 'http://b:1', max_num_seqs: 4}\n"
    )
    lines, _, _ = run(capture, "--config", config, "--target", "a")
    assert lines[-1]["request_slots"]["2048"] == 3
    assert lines[-1]["slots"] == 1
    lines, _, _ = run(capture, "--config", config, "--target", "b", "--engine", engine_file(tmp_path, max_num_seqs=6))
    assert lines[-1]["slots"] == 4
    for options, sentence in (
        (("--config", config), f"{config}: there are several targets: say which by --target; it has a, b"),
        (("--config", config, "--target", "c"), f"{config}: no target is called 'c'; it has a, b"),
    ):
        assert run(capture, *options) == ([], [sentence], 2)
    assert "give --engine FILE, --config FILE, or both" in run(capture)[1][-1]


def test_the_window_is_how_far_back_a_typical_request_is_looked_for(capture: Path) -> None:
    """Requests of 150 tokens, then twice as long ones: a short window forgets the former."""
    bodies = [page(n) for n in range(20)]
    for n in range(20, 60):
        body = page(n)
        for name, before, size in (("request_prompt_tokens", 100, 200), ("request_generation_tokens", 50, 100)):
            own = '{engine="0",model_name="m"}'
            body = body.replace(f"vllm:{name}_sum{own} {before * n}", f"vllm:{name}_sum{own} {before * 19 + size * (n - 19)}")
            for bound in (before, size):
                if bound != size:
                    label = f'{{engine="0",model_name="m",le="{bound}"}}'
                    body = body.replace(f"vllm:{name}_bucket{label} {n}", f"vllm:{name}_bucket{label} 19")
        bodies.append(body)
    write(capture, *(poll(5 * n, body) for n, body in enumerate(bodies)))
    short, long = (replay(capture, "--window", seconds)[0][-1]["request_length_tokens"]["typical"] for seconds in ("20", "1000"))
    assert 150 < long < short <= 300
    assert replay(capture, "--window", "0")[2] == 2


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"max_num_seqs": "8"}, "max_num_seqs: '8' is not a positive whole number"),
        ({"max_model_len": 0}, "max_model_len: 0 is not a positive whole number"),
        ({"tensor_parallel_size": [1]}, "tensor_parallel_size: [1] is not a positive whole number"),
        ({"bytes_per_token": 1.5}, "bytes_per_token: 1.5 is not a positive whole number"),
        ({"block_size": True}, "block_size: True is not a positive whole number"),
        ({"dtype": "int3"}, "dtype: 'int3' is not one of auto, bfloat16, float16, half, float, float32"),
        ({"model_config": 7}, "model_config: 7 is not a path"),
        ({"vllm_version": 0.32}, 'vllm_version: 0.32 is not a version such as "0.32.0"'),
    ],
)
def test_a_setting_of_the_wrong_kind_is_refused(capture: Path, more: dict[str, Any], sentence: str) -> None:
    write(capture, poll(1))
    assert replay(capture, **more) == ([], [f"{capture.parent / 'engine.json'}: {sentence}"], 2)


@pytest.mark.parametrize(
    ("text", "sentence"), [("{", "is not JSON"), ("[]", "is not a JSON object"), (None, "cannot be read: No such")]
)
def test_an_engine_file_that_is_none_is_refused(capture: Path, text: str | None, sentence: str) -> None:
    write(capture, poll(1))
    file = capture.with_name("engine.json")
    if text is not None:
        file.write_text(text)
    lines, (said,), status = run(capture, "--engine", file)
    assert (lines, status) == ([], 2)
    assert said.startswith(f"{file}: {sentence}")


def test_a_capture_that_is_not_there(tmp_path: Path) -> None:
    assert replay(tmp_path / "none.jsonl") == ([], [f"{tmp_path / 'none.jsonl'} cannot be read: No such file or directory"], 2)


def test_what_the_simulator_adds_to_the_settings_is_passed_over(capture: Path) -> None:
    write(capture, *(poll(n, page(n)) for n in range(1, 9)))
    lines, _, status = replay(capture, kv_gib=12.0, model="x/y", scenario="ramp", hbm_bytes_per_s=3.35e12, name=3, seed=None)
    assert status == 0
    assert lines


def test_bytes_and_slots_of_a_model(capture: Path, tmp_path: Path) -> None:
    """A model's own config.json comes before the bytes of a token that a simulated capture states."""
    write(capture, *(poll(5 * n, page(n)) for n in range(1, 9)))
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    assert replay(capture, model_config=LLAMA_8B)[0][-1]["bytes_per_token"] == 131072
    assert replay(capture, model_config="config.json", vllm_version="0.29.0")[0][-1]["bytes_per_token"] == 131072
    lines, sentences, status = replay(capture, model_config="none.json")
    assert (lines, status) == ([], 2)
    assert sentences == [f"{tmp_path / 'none.json'} does not exist here"]


def test_a_model_that_is_not_known_is_a_sentence(capture: Path) -> None:
    write(capture, *(poll(5 * n, page(n)) for n in range(1, 9)))
    lines, sentences, status = replay(capture, model_config={"architectures": ["NoSuchForCausalLM"]})
    assert (lines, status) == ([], 0)
    assert "NoSuchForCausalLM" in sentences[0]
    assert len(sentences) == 2


def test_settings_of_another_engine_show(capture: Path) -> None:
    write(capture, *(poll(n, page(n)) for n in range(1, 9)))
    _, sentences, _ = replay(capture, block_size=32)
    assert sentences[0] == f"{capture}: block_size is 16 on the page, not 32: are these settings of this engine?"
    assert sum("block_size" in sentence for sentence in sentences) == 1


def test_a_reader_that_has_seen_enough_ends_it_quietly(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", *(poll(5 * n, page(n)) for n in range(1, 200)))
    command = [sys.executable, "-m", "kvcache_exporter", "replay", str(file), "--engine", str(engine_file(tmp_path))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith(b'{"t": ')
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


def test_lines_come_as_their_pages_do(tmp_path: Path) -> None:
    """A capture that is still being written, through a pipe: what is known shows before its end."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    command = [sys.executable, "-m", "kvcache_exporter", "replay", str(pipe), "--engine", str(engine_file(tmp_path))]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process, pipe.open("w") as stream:
        assert process.stdout is not None
        stream.writelines(f"{poll(n, page(n))}\n" for n in range(1, 20))
        stream.flush()
        assert process.stdout.readline().startswith(b'{"t": ')


def test_what_was_served_is_replayed(upstream: Upstream, tmp_path: Path) -> None:
    """The whole way: an engine over HTTP, `serve --record`, an end by SIGTERM, `replay`; twice, into one file."""
    file = tmp_path / f"recorded{SUFFIX}"
    for start in (1, 10):
        upstream.page(page(start).encode(), models=models_answer(4096))
        upstream.requests.clear()
        arguments = ["serve", "--vllm-url", upstream.url, "--record", str(file), "--listen-address", f"127.0.0.1:{free_port()}"]
        with subprocess.Popen([sys.executable, "-m", "kvcache_exporter", *arguments], stderr=subprocess.DEVNULL) as process:
            wait_until(lambda: "/metrics" in [path for path, _ in upstream.requests])
            wait_until(lambda: file.exists() and file.stat().st_size > 0)
            upstream.page(page(start + 5).encode(), models=models_answer(4096))
            wait_until(lambda: [path for path, _ in upstream.requests].count("/metrics") >= 2, seconds=15)
            process.send_signal(signal.SIGTERM)
        assert process.returncode == 0
    rows = [json.loads(line) for line in gzip.decompress(file.read_bytes()).splitlines()]
    assert [row["metrics"] for row in rows] == [page(1), page(6), page(10), page(15)]
    assert {(row["target"], row["status"]) for row in rows} == {(upstream.url.removeprefix("http://"), 200)}
    lines, _, status = replay(file)
    assert status == 0
    assert lines[-1]["t"] == rows[-1]["t"]
    assert lines[-1]["slots"] == 6


def test_polls_that_fail_are_recorded(tmp_path: Path) -> None:
    file = tmp_path / f"recorded{SUFFIX}"
    ours = f"127.0.0.1:{free_port()}"
    arguments = ["serve", "--vllm-url", f"http://127.0.0.1:{free_port()}", "--record", str(file), "--listen-address", ours]
    with subprocess.Popen([sys.executable, "-m", "kvcache_exporter", *arguments], stderr=subprocess.DEVNULL) as process:
        wait_until(lambda: file.exists() and file.stat().st_size > 0)
        process.send_signal(signal.SIGTERM)
    assert json.loads(gzip.decompress(file.read_bytes()).splitlines()[0])["status"] == -1


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("a.json", "is not called *.jsonl.gz"),
        ("no/a.jsonl.gz", "cannot be written: No such file"),
        ("b.jsonl.gz", "is not gzip'd"),
    ],
)
def test_a_file_that_cannot_take_a_capture_is_refused(tmp_path: Path, name: str, sentence: str) -> None:
    (tmp_path / "b.jsonl.gz").write_text("mine")
    command = ["serve", "--vllm-url", "http://127.0.0.1:9", "--record", str(tmp_path / name)]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 2
    assert sentence in " ".join(result.stderr.replace("│", "").split())


@needs_series
@pytest.mark.parametrize("file", sorted(SERIES.glob("*.metrics.jsonl.gz")), ids=lambda file: file.name.split(".metrics")[0])
def test_recorded_engines(file: Path, tmp_path: Path) -> None:
    facts = engine_file(tmp_path, block_size=32, max_num_seqs=32)
    lines, _, status = run(file, "--engine", facts, "--interval", "5")
    assert status == 0
    engines = {line["engine"] for line in lines}
    assert engines == ({"0", "1"} if file.name.startswith("dp2") else {"0"})
    assert lines
    for line in lines:
        assert line.get("slots", 0) >= 0
        assert line["capacity_blocks"] >= line.get("used_blocks", 0)
    if file.name.startswith("ramp-kv-bound"):
        assert min(line["slots"] for line in lines) == 0
        assert max(line["slots"] for line in lines) > 10
