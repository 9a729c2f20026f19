"""`lmi-server bench`, against the real server in every API, and against a scripted one for faults."""

from __future__ import annotations

import csv
import itertools
import json
import os
import re
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from forked_servers import run_command
from server_helpers import Server, serving
from typer.testing import CliRunner

from lmi_server.bench.arrivals import BURSTINESS, OpenLoop, Replay, within
from lmi_server.bench.client import Target
from lmi_server.bench.dialects import NAMES, dialect_of
from lmi_server.bench.observation import Observation, Observer, server_figures
from lmi_server.bench.prompt_files import read_prompts
from lmi_server.bench.records import Record, distribution, summary
from lmi_server.bench.reports.html_report import timeline
from lmi_server.bench.reports.terminal_report import TITLES
from lmi_server.bench.server_metrics import cache_hit, queue_time, read, waiting
from lmi_server.bench.workload import Prompt, RandomPrompts, Recorded, Turn, with_adapters
from lmi_server.client.server_calls import increase
from lmi_server.commands.cli import app
from lmi_server.contract.errors import ConfigurationError
from lmi_server.machine.device_tools import GpuLoad
from lmi_server.processes.usage import ProcessUsage


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("bench"), max_rolling_batch_size=64) as server:
        yield server


def bench(url: str, directory: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """Run the command; return what it printed, and the figures that it wrote."""
    figures = directory / "figures.json"
    done = run_command("bench", url, *arguments, "--json", str(figures), env=os.environ, cwd=directory)
    return done, json.loads(figures.read_text())["runs"] if figures.exists() else {}


def url_of(server: Server) -> str:
    return f"http://127.0.0.1:{server.port}"


@pytest.mark.parametrize("api", ["completions", "chat", "lmi", "tgi"])
@pytest.mark.parametrize("stream", ["--stream", "--no-stream"])
def test_every_api_is_measured(server: Server, tmp_path: Path, api: str, stream: str) -> None:
    shape = ("--input-tokens", "6", "--output-tokens", "5", "--requests", "9", "--concurrency", "1,4")
    done, runs = bench(url_of(server), tmp_path, "--api", api, stream, *shape)
    assert (done.returncode, done.stderr) == (0, "")
    assert list(runs) == ["concurrency 1", "concurrency 4"]
    for run in runs.values():
        assert (run["requests"], run["completed"], run["errors"]) == (9, 9, {})
        assert run["output_tokens"] == 9 * 5
        assert run["e2el_ms"]["median"] > 0
        assert (run["ttft_ms"] == {}) == (stream == "--no-stream")
        assert run["requests_per_s"] == pytest.approx(9 / run["duration_s"])
    assert "concurrency 4" in done.stdout


def test_an_open_loop_sends_by_the_clock_however_long_answers_take(server: Server, tmp_path: Path) -> None:
    """Each request waits for ever, so a closed loop of one would send one."""
    (tmp_path / "data").write_text('{"prompt": "wait"}\n')
    arguments = ("--data", "data", "--rate", "20", "--burstiness", "inf", "--duration", "1", "--timeout", "2")
    done, runs = bench(url_of(server), tmp_path, *arguments, "--warmup", "0")
    assert done.returncode == 1
    assert runs["20 requests/s"]["errors"] == {"no end within 2 s": 20}
    server.until("lmi_requests_in_flight", 0)


@pytest.mark.slow
def test_progress_is_told_without_a_terminal(server: Server, tmp_path: Path) -> None:
    """A run of minutes is not silent, and the output has the figures alone."""
    (tmp_path / "data").write_text('{"prompt": "wait"}\n')
    arguments = ("--data", "data", "--rate", "10", "--burstiness", "inf", "--duration", "6", "--timeout", "7")
    done, runs = bench(url_of(server), tmp_path, *arguments, "--warmup", "0")
    lines = done.stderr.splitlines()
    assert re.match(r"10 requests/s: done \d\d %, running [45]\d, ended 0, failed 0, requests/s 0.0, ", lines[0])
    assert lines[-1].startswith("10 requests/s: done 100 %")
    assert "done" not in done.stdout
    assert list(runs["10 requests/s"]["errors"]) == ["no end within 7 s"]
    server.until("lmi_requests_in_flight", 0)


def test_errors_are_counted_by_what_the_server_says(server: Server, tmp_path: Path) -> None:
    (tmp_path / "data").write_text('{"prompt": "fine"}\n{"prompt": "refuse"}\n{"prompt": "raise"}\n')
    done, runs = bench(url_of(server), tmp_path, "--data", "data", "--requests", "6", "--records", "records")
    assert done.returncode == 0
    (run,) = runs.values()
    assert run["completed"] == 2
    (refused, raised) = sorted(run["errors"].items())
    assert refused == ("400: the prompt is refused", 2)
    assert raised[1] == 2
    assert "raised before the first token" in raised[0]
    records = [json.loads(line) for line in (tmp_path / "records").read_text().splitlines()]
    assert [record["status"] for record in records] == [200, 400, 500] * 2


def test_goodput_and_the_csv_file(server: Server, tmp_path: Path) -> None:
    arguments = ("--requests", "5", "--output-tokens", "3", "--slo", "e2el=60000,ttft=0.000001", "--csv", "runs.csv")
    _, runs = bench(url_of(server), tmp_path, *arguments)
    assert runs["concurrency 1"]["goodput_per_s"] == 0
    _, runs = bench(url_of(server), tmp_path, *arguments[:-3], "e2el=60000", "--csv", "runs.csv")
    assert runs["concurrency 1"]["goodput_per_s"] == runs["concurrency 1"]["requests_per_s"]
    (line,) = csv.DictReader((tmp_path / "runs.csv").read_text().splitlines())
    assert (line["run"], line["requests"], line["errors"]) == ("concurrency 1", "5", "0")
    assert float(line["e2el_ms_p99"]) == runs["concurrency 1"]["e2el_ms"]["p99"]


def test_the_report_opens_offline_and_has_the_figures(server: Server, tmp_path: Path) -> None:
    arguments = ("--requests", "6", "--output-tokens", "5", "--concurrency", "1,3", "--html", "report.html")
    done, runs = bench(url_of(server), tmp_path, *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    text = (tmp_path / "report.html").read_text()
    assert not re.findall(r"""(?:src|href)\s*=|@import|url\(|\bfetch\(|XMLHttpRequest""", text)
    assert "Permission is hereby granted" in text  # uPlot's licence asks to be passed on
    assert f'<th scope="row">requests/s</th><td>{runs["concurrency 1"]["requests_per_s"]:,.2f}</td>' in text
    plots: dict[str, list[dict[str, Any]]] = {}
    for plot in json.loads(
        re.findall(r'<script type="application/json" id="plots">(.*?)</script>', text, re.DOTALL)[0]
    ):
        assert all(len(values) == len(plot["x"]) for _, values in plot["series"])
        assert plot["x"] == sorted(plot["x"])
        plots.setdefault(plot["title"], []).append(plot)
    assert [len(plots[f"{title}, by throughput"][0]["x"]) for title in TITLES.values()] == [2] * 4
    assert [name for name, _ in plots["end to end"][0]["series"]] == ["concurrency 1", "concurrency 3"]
    assert len(text.split('<figure data-plot="')) - 1 == sum(map(len, plots.values()))
    for plot, run in zip(plots["Output tokens per second"], runs.values(), strict=True):
        step_s = plot["x"][1] if len(plot["x"]) > 1 else 0.05
        assert sum(plot["series"][0][1]) * step_s == pytest.approx(run["output_tokens"])


def test_the_server_is_watched_meanwhile(server: Server, tmp_path: Path) -> None:
    """nvidia-smi says that two GPUs work."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '30, 1000'\necho '50, 2000'\n")
    tool.chmod(0o755)
    figures = tmp_path / "figures.json"
    variables = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    arguments = ("--requests", "200", "--json", str(figures), "--html", "report.html", "--csv", "runs.csv")
    assert run_command("bench", url_of(server), *arguments, env=variables, cwd=tmp_path).returncode == 0
    (run,) = json.loads(figures.read_text())["runs"].values()
    found = run["server"]
    assert found["gpu_load_mean"] == pytest.approx(0.4)
    assert found["gpu_memory_bytes_max"] == 3000 * 2**20
    assert found["memory_bytes_max"] > 2**25  # the server and its worker, two interpreters
    assert found["cpu_cores"] > 0
    assert found["queue_ms"] >= 0
    assert found["waiting_max"] >= 0
    assert '"title": "Server: processor"' in (tmp_path / "report.html").read_text()
    (line,) = csv.DictReader((tmp_path / "runs.csv").read_text().splitlines())
    assert float(line["server_cpu_cores"]) == found["cpu_cores"]


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_each_turn_of_a_chat_sends_back_what_was_said(server: Server, tmp_path: Path, api: str) -> None:
    """The second prompt has 2 words, an answer of 4 and 1 word; the third one 4 and 2 more."""
    (tmp_path / "data").write_text('{"turns": ["a b", "c", "d e"], "max_tokens": 4}\n')
    arguments = ("--api", api, "--data", "data", "--requests", "2", "--concurrency", "2", "--warmup", "0")
    done, runs = bench(url_of(server), tmp_path, *arguments, "--records", "records")
    assert (done.returncode, done.stderr) == (0, "")
    assert (runs["concurrency 2"]["completed"], runs["concurrency 2"]["errors"]) == (6, {})
    records = [json.loads(line) for line in (tmp_path / "records").read_text().splitlines()]
    assert sorted(record["usage"]["prompt_tokens"] for record in records) == sorted([2, 7, 13] * 2)


@pytest.mark.parametrize("api", NAMES)
@pytest.mark.parametrize("stream", [True, False])
def test_the_text_of_an_answer_is_read_in_every_api(server: Server, api: str, stream: bool) -> None:
    dialect = dialect_of(api, stream)
    body = dialect.body(Prompt("a b", output_tokens=4, exact=True), "lmi", stream)
    answer = httpx.post(url_of(server) + dialect.path, json=body).content
    assert dialect.usage(answer, stream)["completion_tokens"] == 4
    assert dialect.text(answer, stream).split() == ["a", "b", "a", "b"]


def test_a_chat_ends_with_the_run_or_an_error(server: Server, tmp_path: Path) -> None:
    (tmp_path / "data").write_text('{"turns": ["refuse", "never"]}\n{"turns": ["a", "b", "c"]}\n')
    _, runs = bench(url_of(server), tmp_path, "--data", "data", "--requests", "2", "--turns", "2", "--warmup", "0")
    assert runs["concurrency 1"]["errors"] == {"400: the prompt is refused": 1}
    assert runs["concurrency 1"]["completed"] == 2
    arguments = ("--turns", "3", "--input-tokens", "4", "--output-tokens", "2", "--rate", "50", "--requests", "3")
    _, runs = bench(url_of(server), tmp_path, *arguments)
    assert (runs["50 requests/s"]["completed"], runs["50 requests/s"]["prompt_tokens"]) == (9, 3 * (4 + 10 + 16))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--turns", "0"], '--turns "0" is not allowed; allowed: an integer from 1 to 10000000'),
        (["--metrics", "http://127.0.0.1:1/metrics"], "--metrics http://127.0.0.1:1/metrics: "),
        (["--api", "grpc"], '--api "grpc" is not allowed; allowed: chat, completions, lmi, tgi'),
        (["--rate", "1", "--concurrency", "1"], "--concurrency, --rate and --replay exclude each other"),
        (["--rate", "0"], '--rate "0" is not allowed; allowed: a number above 0'),
        (["--slo", "speed=1"], '--slo "speed" is not allowed; allowed: ttft, tpot, itl, e2el'),
        (["--ramp-to", "3"], "--ramp-to needs --rate, where it begins, and --duration"),
        (["--replay", "1"], '--replay needs --data with lines that all have "at"'),
        (["--replay", "2x"], '--replay "2x" is neither a speed above 0 nor a file'),
        (["--header", "x"], '--header "x" is not allowed; allowed: "name: value"'),
        (["--data", "none"], "--data none: [Errno 2] No such file"),
        (["--tokenizer", "none"], "--tokenizer none: there is no none"),
        ([], "the server does not answer as it should: cannot connect: "),
    ],
)
def test_what_cannot_be_done_is_said(tmp_path: Path, arguments: list[str], message: str) -> None:
    with socket.socket() as unused:  # bound, and nobody listens
        unused.bind(("127.0.0.1", 0))
        done, _ = bench(f"http://127.0.0.1:{unused.getsockname()[1]}", tmp_path, *arguments)
    assert done.returncode == 1
    assert done.stderr.startswith(message)
    assert "Traceback" not in done.stderr


# --- a server that misbehaves ---


@contextmanager
def scripted(answer: Callable[[socket.socket, int], None]) -> Iterator[str]:
    """Serve each connection with a request by `answer`, which gets the number of the connection."""

    def accept() -> None:
        number = 0
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                if connection.recv(4, socket.MSG_PEEK) == b"GET ":  # of /metrics: there are none
                    connection.recv(65536)
                    connection.sendall(b"nonsense\r\n\r\n")
                else:
                    answer(connection, number)
                    number += 1

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=accept)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(60)


def whole(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


@pytest.mark.slow
def test_a_kept_connection_that_the_server_has_closed_is_no_error(tmp_path: Path) -> None:
    def answer(connection: socket.socket, number: int) -> None:
        connection.recv(65536)
        connection.sendall(whole(b'{"usage": {"completion_tokens": 3}}'))
        connection.recv(1)  # the start of the next request, which gets no answer

    with scripted(answer) as url:
        done, runs = bench(url, tmp_path, "--no-stream", "--requests", "4", "--warmup", "0")
    assert done.returncode == 0
    assert (runs["concurrency 1"]["completed"], runs["concurrency 1"]["errors"]) == (4, {})


def test_an_answer_that_breaks_off_is_an_error(tmp_path: Path) -> None:
    def answer(connection: socket.socket, number: int) -> None:
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\n{" if number else b"nonsense\r\n\r\n")

    with scripted(answer) as url:
        _, runs = bench(url, tmp_path, "--requests", "2", "--warmup", "0")
    garbled, broken = sorted(runs["concurrency 1"]["errors"], reverse=True)
    assert garbled.startswith("the connection broke")
    assert broken.startswith("the answer is not HTTP")


def test_an_error_inside_a_stream_is_an_error(tmp_path: Path) -> None:
    events = b'data: {"choices": [{"text": " a"}]}\n\ndata: {"error": {"message": "out of memory"}}\n\n'

    def answer(connection: socket.socket, number: int) -> None:
        connection.recv(65536)
        connection.sendall(whole(events))

    with scripted(answer) as url:
        _, runs = bench(url, tmp_path, "--requests", "1", "--warmup", "0")
    (error,) = runs["concurrency 1"]["errors"]
    assert "out of memory" in error


# --- what is sent, and when ---


def test_gaps_have_the_rate_and_the_burstiness() -> None:
    def gaps(loop: OpenLoop) -> list[float]:
        times = list(itertools.islice(loop.offsets(1), 20_001))
        return [after - before for before, after in itertools.pairwise(times)]

    def spread(values: list[float]) -> float:
        """Return the coefficient of variation: that of gamma's gaps is 1 / sqrt(burstiness)."""
        mean = sum(values) / len(values)
        return float((sum((value - mean) ** 2 for value in values) / len(values)) ** 0.5 / mean)

    assert gaps(OpenLoop(4, float("inf"))) == pytest.approx([0.25] * 20_000)
    for burstiness in (0.25, 1.0, 4.0):
        found = gaps(OpenLoop(4, burstiness))
        assert sum(found) / len(found) == pytest.approx(0.25, rel=0.05)
        assert spread(found) == pytest.approx(burstiness**-0.5, rel=0.05)


def test_the_bounds_of_the_burstiness_draw_gaps() -> None:
    for burstiness in BURSTINESS:
        times = list(itertools.islice(OpenLoop(4, burstiness).offsets(1), 10_000))
        assert 0 < times[-1] < float("inf")


@pytest.mark.parametrize(
    ("flag", "text", "allowed"),
    [
        ("--burstiness", "9e307", "a number from 0.001 to 1000000 or inf"),
        ("--burstiness", "1e-320", "a number from 0.001 to 1000000 or inf"),
        ("--rate", "1e308", "a number above 0 and at most 1000000000"),
        ("--ramp-to", "1e308", "a number above 0 and at most 1000000000"),
    ],
)
def test_a_load_that_would_never_end_is_refused(flag: str, text: str, allowed: str) -> None:
    done = CliRunner().invoke(app, ["bench", "http://127.0.0.1:1", flag, text])
    assert (done.exit_code, done.stderr) == (1, f'{flag} "{text}" is not allowed; allowed: {allowed}\n')


def test_a_ramp_ends_at_its_rate() -> None:
    times = list(within(OpenLoop(10, float("inf"), 30, 10).offsets(0), None, 10))
    assert len([at for at in times if at < 1]) == 11
    assert len([at for at in times if at >= 9]) == pytest.approx(29, abs=1)
    assert len(list(within(OpenLoop(10).offsets(0), 7, None))) == 7


def test_a_trace_is_replayed_at_its_times() -> None:
    assert list(Replay((12.0, 10.0, 11.0), speed=2).offsets(0)) == [0.0, 0.5, 1.0]


def test_random_prompts_share_a_prefix_and_nothing_more() -> None:
    texts = [prompt.text.split() for prompt in itertools.islice(RandomPrompts(40, 8, 0.5).prompts(3), 50)]
    assert {len(text) for text in texts} == {40}
    assert len({tuple(text[:20]) for text in texts}) == 1
    assert len({tuple(text[20:]) for text in texts}) == 50
    again = next(RandomPrompts(40, 8, 0.5).prompts(3)).text.split()
    assert again == texts[0]
    assert next(RandomPrompts(40, 8, 0.5).prompts(4)).text.split()[:20] != texts[0][:20]


def test_a_tokenizer_counts_the_tokens_of_a_random_prompt() -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))  # a token for each letter
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    prompt = next(RandomPrompts(40, 8, tokenizer=tokenizer).prompts(0))
    assert len(prompt.text.split()) > 2
    assert 30 < len(tokenizer.encode(prompt.text).ids) <= 40


def test_adapters_come_by_their_weights() -> None:
    prompts = list(itertools.islice(with_adapters(itertools.repeat(Prompt("a")), {"base": 1, "x": 3}, 0), 4000))
    assert len([prompt for prompt in prompts if prompt.adapter == "x"]) == pytest.approx(3000, abs=150)
    assert {prompt.adapter for prompt in prompts} == {None, "x"}


def test_files_of_prompts(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_text('{"prompt": "a", "max_tokens": 4, "at": 1.5, "adapter": "x"}\n\n{"messages": [{"role": "user"}]}\n')
    first, second = read_prompts(path)
    assert first == Prompt("a", output_tokens=4, adapter="x", at=1.5)
    assert second.messages == ({"role": "user"},)
    turns = [{"from": "human", "value": "why?"}, {"from": "gpt", "value": "because it is"}]
    path.write_text(json.dumps([{"conversations": turns}, {"conversations": turns[:1]}]))
    assert read_prompts(path) == [Prompt("why?", output_tokens=3)]
    system = {"from": "system", "value": "be kind"}
    unnamed = [{"value": turn["value"]} for turn in turns]
    path.write_text(json.dumps([{"conversations": [system, *turns, *turns]}, {"conversations": [*unnamed, *unnamed]}]))
    assert read_prompts(path) == [Prompt("why?", output_tokens=3, later=(Turn("why?", 3),))] * 2
    path.write_text('{"turns": ["a", "b"], "max_tokens": 4}')
    assert read_prompts(path) == [Prompt("a", output_tokens=4, later=(Turn("b", 4),))]
    (asked,) = itertools.islice(Recorded(read_prompts(path), 7).prompts(0), 1)
    assert (asked.output_tokens, asked.later) == (7, (Turn("b", 7),))
    for wrong, message in (
        ("", "has no prompts"),
        ('{"prompt": "a"}\n{"text": "b"}', "line 2: it has neither prompt, messages nor turns"),
        ("[1]", "ShareGPT's form is"),
        ('[{"conversations": ["a"]}]', "ShareGPT's form is"),
        ('{"prompt": "a\u2028", "max_tokens": 1}\n{"prompt": "a", "max_tokens": 1e999}', "line 2: "),
        ("no json", "line 1: "),
        ('{"messages": "abc"}', "line 1: messages is no list of objects"),
        ('{"messages": ["abc"]}', "line 1: messages is no list of objects"),
        ('{"turns": "ab"}', "line 1: turns is no list of texts"),
        ('{"prompt": "a", "at": NaN}', "line 1: at is nan, no second from the start"),
        ('{"prompt": "a", "at": 1e999}', "line 1: at is inf, no second from the start"),
    ):
        path.write_text(wrong, encoding="utf-8")
        with pytest.raises(ConfigurationError, match=message):
            read_prompts(path)


@pytest.mark.parametrize("command", [("bench", "URL"), ("verify", "URL", "URL"), ("tune", "DIR")], ids=lambda c: c[0])
def test_a_pipe_in_place_of_prompts_is_not_waited_for(command: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "serving.properties").write_text("option.entryPoint=djl_python.echo\nmaxWorkers=1\n")
    pipe = tmp_path / "prompts.jsonl"
    os.mkfifo(pipe)
    places = {"URL": "http://127.0.0.1:1", "DIR": str(tmp_path)}
    words = [places.get(word, word) for word in command]
    if command[0] == "tune":
        words += ["--option", "job_queue_size=1,2"]
    for data in (pipe, tmp_path):  # a directory is read by its *.jsonl
        done = CliRunner().invoke(app, [*words, "--data", str(data)])
        assert done.exit_code == 1
        assert done.stderr.splitlines()[-1].endswith(f"is a pipe or a device; put a file there: '{pipe}'")


# --- the server's own figures ---

VLLM = """# TYPE vllm:kv_cache_usage_perc gauge
lmi_queue_depth{model="m"} 3.0
lmi_queue_time_seconds_sum{model="m"} 2.0
lmi_queue_time_seconds_count{model="m"} 4.0
vllm:num_requests_waiting{engine="0",model_name="a b",worker="0"} 2.0
vllm:kv_cache_usage_perc{worker="0"} 0.5
vllm:kv_cache_usage_perc{worker="1"} 0.25
vllm:prefix_cache_hits_total{worker="0"} 10.0
vllm:prefix_cache_queries_total{worker="0"} 40.0
vllm:request_queue_time_seconds_bucket{le="1"} 9.0
vllm:request_queue_time_seconds_sum{worker="0"} 1.0
vllm:request_queue_time_seconds_count{worker="0"} 4.0
lmi_handler_kv_cache_usage{worker="0"} 0.9
no sample
"""


def test_metrics_of_every_server_are_read() -> None:
    vllm = read(VLLM)
    assert waiting(vllm) == 5
    assert vllm["kv_usage"] == 0.375
    assert cache_hit({}, vllm) == 0.25
    assert queue_time({}, vllm) == 0.75
    sglang = read(
        'sglang:token_usage{a="b"} 0.28\nsglang:cached_tokens_total 5\nsglang:prompt_tokens_total 20 1700000000000'
    )
    assert (sglang["kv_usage"], cache_hit({}, sglang), waiting(sglang)) == (0.28, 0.25, None)
    own = read("lmi_cached_prompt_tokens_total 30\nlmi_prompt_tokens_total 100")
    assert cache_hit(own, own) is None
    assert cache_hit({"cached_tokens": 20.0, "looked_up_tokens": 80.0}, own) == 0.5
    assert increase({"retracted": 9.0}, {"retracted": 2.0}, "retracted") == 2  # the server has started again
    assert read("# nothing") == {}


REPEATED = """lmi_queue_depth{model="m"} 3.0
lmi_queue_time_seconds_sum{model="m"} 2.0
lmi_queue_time_seconds_count{model="m"} 4.0
lmi_handler_running_requests{model="m",worker="m-0"} 4.0
lmi_handler_waiting_requests{model="m",worker="m-0"} 1.0
lmi_handler_retracted_requests_total{model="m",worker="m-0"} 6.0
vllm:num_requests_running{model="m",model_name="m"} 4.0
vllm:num_requests_waiting{model="m",model_name="m"} 4.0
vllm:request_queue_time_seconds_sum{model="m",model_name="m"} 2.0
vllm:request_queue_time_seconds_count{model="m",model_name="m"} 4.0
"""


def test_what_this_server_repeats_under_vllms_names_counts_once() -> None:
    reading = read(REPEATED)
    assert waiting(reading) == 4
    assert queue_time({}, reading) == 0.5
    assert (reading["running"], reading["retracted"]) == (4, 6)


def test_figures_are_of_what_could_be_seen() -> None:
    seen = [
        Observation(0.0, {"kv_usage": 0.1, "retracted": 1.0}, ProcessUsage(10.0, 100), GpuLoad(0.5, 7)),
        Observation(1.0, {}, ProcessUsage(11.0, 300), None),
        Observation(2.0, {"kv_usage": 0.3, "retracted": 3.0}, ProcessUsage(13.0, 200), GpuLoad(0.7, 5)),
    ]
    assert server_figures(seen) == pytest.approx(
        {
            "retracted": 2.0,
            "kv_usage_before": 0.1,
            "kv_usage_max": 0.3,
            "kv_usage_after": 0.3,
            "memory_bytes_max": 300,
            "cpu_cores": 1.5,
            "gpu_load_mean": 0.6,
            "gpu_memory_bytes_max": 7,
        }
    )
    nothing = Observer().observe()
    assert server_figures([nothing, nothing]) == {}


# --- figures ---


def test_a_timeline_has_each_request_and_token_in_its_step() -> None:
    slow = Record(due=10.0, sent=10.0, first=10.11, end=18.01, gaps=[7.8], events=2, usage={"completion_tokens": 4})
    broken = Record(due=14.0, sent=14.0, end=15.01, error="500: broken")
    found = timeline([slow, broken])
    assert found.step_s == 0.05
    assert len(found.times) == 161
    assert [found.in_flight[step] for step in (0, 90, 100, 150, 160)] == pytest.approx([1, 2, 1.2, 1, 0.2])
    assert {index: value for index, value in enumerate(found.tokens_per_s) if value} == {2: 40.0, 158: 40.0}
    assert {index: value for index, value in enumerate(found.failed_per_s) if value} == {100: 20.0}
    assert sum(found.ended_per_s) * found.step_s == pytest.approx(1)
    assert len(timeline([]).times) == 1


def test_latencies_count_from_when_a_request_was_due() -> None:
    late = Record(due=10.0, sent=11.0, first=11.5, end=12.5, gaps=[0.4, 0.6], events=3, status=200)
    failed = Record(due=10.0, sent=10.0, end=14.0, error="500: broken")
    found = summary([late, failed], {"ttft": 1.5, "itl": 0.6})
    assert (found["requests"], found["completed"], found["errors"]) == (2, 1, {"500: broken": 1})
    assert found["duration_s"] == 4.0
    assert found["output_tokens_per_s"] == 3 / 4
    assert found["ttft_ms"]["p99"] == 1500
    assert found["tpot_ms"]["mean"] == 500
    assert found["e2el_ms"]["median"] == 2500
    assert found["sent_late_ms"]["p99"] == 1000
    assert found["goodput_per_s"] == 1 / 4
    assert summary([late, failed], {"itl": 0.5})["goodput_per_s"] == 0


def test_quantiles_are_values_that_were_measured() -> None:
    assert distribution([]) == {}
    assert distribution([3.0]) == {"mean": 3.0, "median": 3.0, "p90": 3.0, "p95": 3.0, "p99": 3.0}
    assert distribution(range(1, 101)) == {"mean": 50.5, "median": 50, "p90": 90, "p95": 95, "p99": 99}


def test_half_a_character_of_a_captured_prompt_ends_no_run() -> None:
    target = Target("h", 80, "", None, (), "m", dialect_of(NAMES[0], True), stream=True)
    assert rb"cut \\ud83d" in target.request(Prompt("cut \ud83d"))
