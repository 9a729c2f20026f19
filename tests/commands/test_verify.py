"""`lmi-server verify`: which answers changed, by how much, and how the speed did."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from forked_servers import run_command
from paths import ROOT
from server_helpers import make_model, running
from waiting import wait_until

from lmi_server.bench.paired import PairedRatios
from lmi_server.bench.workload import Prompt
from lmi_server.client.server_calls import ServerCalls
from lmi_server.contract.errors import ConfigurationError
from lmi_server.verify.asking import Answer, ScoredToken, Side
from lmi_server.verify.command import _ask_again, _complaints
from lmi_server.verify.comparison import compare, summarize
from lmi_server.verify.report import as_json, lines
from lmi_server.verify.waiting import Unanswered, lines_while_waiting


def verify(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return run_command("verify", *map(str, arguments), env=os.environ, cwd=ROOT)


def answer(*texts: str, logprob: float = -0.5, seconds: float = 1.0, **tops: float) -> Answer:
    tokens = tuple(ScoredToken(text, logprob, {text: logprob, **tops}) for text in texts)
    return Answer("".join(texts), tokens, seconds)


def test_a_tie_is_told_from_a_change_of_mind() -> None:
    tie = compare("p", answer("a", "b", c=-0.55), answer("a", "c", logprob=-0.6))
    assert (tie.changed, tie.place, tie.is_beyond) == (True, 1, False)
    assert tie.gap == pytest.approx(0.05)
    assert tie.shifts == pytest.approx((-0.1,))
    change = compare("p", answer("a", "b", c=-9.0), answer("a", "d"))
    assert (change.place, change.is_beyond, change.gap) == (1, True, 8.5)
    shorter = compare("p", answer("a", "b"), answer("a"))
    assert (shorter.changed, shorter.place, shorter.gap) == (True, 1, None)
    summary = summarize([tie, change, shorter, compare("p", answer("a"), answer("a"))])
    assert (summary.prompts, summary.changed, summary.ties) == (4, 3, 1)
    unknown = compare("p", answer("a", "b"), answer("a", "c"))
    assert (unknown.changed, unknown.is_tie) == (True, False), "how likely the new token was is not known"


def test_errors_are_counted_and_compare_nothing() -> None:
    pairs = [compare("p", answer("a"), Answer(error="no")), compare("p", Answer(error="no"), Answer(error="no"))]
    summary = summarize(pairs)
    assert (summary.failed_old, summary.failed_new, summary.changed, summary.latency) == (1, 2, 0, None)
    assert json.loads(as_json(summary, summary, pairs))["pairs"][0]["error"] == "no"


def test_what_is_compared_was_answered_by_both() -> None:
    half = [compare("p", answer("a"), Answer(error="no")), compare("p", Answer(error="no"), answer("a"))]
    assert summarize(half).compared == 0
    [complaint] = _complaints(summarize(half), None, None)
    assert "nothing was compared" in complaint
    both = [*half, compare("p", answer("a"), answer("b"))]
    assert "changed      1 of 1 answers" in "\n".join(lines(summarize(both), summarize([]), both))
    assert not list(_complaints(summarize(both), 100, None))


CLOSED = b"HTTP/1.0 %b\r\n\r\n"
INFINITE = b'{"choices": [{"text": "a", "logprobs": {"tokens": ["a"], "token_logprobs": [1%b]}}]}' % (b"0" * 400)


@pytest.mark.parametrize(
    "answered",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{",
        b"no HTTP\r\n\r\n",
        CLOSED % b"200 OK" + b"[" * 100_000,
        CLOSED % b"400 Bad Request" + b"[" * 100_000,
        CLOSED % b"200 OK" + INFINITE,
    ],
    ids=["half", "no HTTP", "deep", "deep error", "infinite"],
)
def test_what_is_no_answer_is_a_failure_of_one_prompt(answered: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as threads:

        def answer_half() -> None:
            with listener.accept()[0] as connection:
                connection.recv(65536)
                connection.sendall(answered)

        threads.submit(answer_half)
        side = Side("old", ServerCalls(f"http://127.0.0.1:{listener.getsockname()[1]}", {}), "m")
        assert side.ask(Prompt("a b"), 4, 60).error


def test_an_answer_that_comes_byte_by_byte_is_none_within_the_timeout() -> None:
    asked = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as threads:

        def drip() -> None:
            with listener.accept()[0] as connection, contextlib.suppress(OSError):
                connection.recv(65536)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n")
                for _ in range(100):
                    connection.sendall(b" ")
                    if asked.wait(0.1):
                        return

        threads.submit(drip)
        side = Side("old", ServerCalls(f"http://127.0.0.1:{listener.getsockname()[1]}", {}), "m")
        found = side.ask(Prompt("a b"), 4, 2)
        asked.set()
    assert (found.is_missing, found.error) == (True, f"{side.server.url} does not answer: timed out")


def test_a_server_that_does_not_answer_ends_the_comparison_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        found = verify(url, url, "--timeout", "1")
        accepted = 0
        listener.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                listener.accept()[0].close()
                accepted += 1
    assert found.returncode == 1
    assert "OLD and NEW are the same: what differs is noise" in found.stderr
    assert f"old: {url} does not answer: timed out; it has --timeout=1 seconds for each answer" in found.stderr
    assert accepted == 1, "50 prompts would take 100 times the timeout"


def test_a_server_that_stops_answering_ends_the_comparison() -> None:
    side, missing = cast("Side", SimpleNamespace(title="new")), Answer(error="u does not answer", is_missing=True)
    unanswered = Unanswered(60)
    for given in (missing, missing, answer("a"), missing, Answer(error="refused"), missing, missing):
        unanswered.count(side, given)
    with pytest.raises(ConfigurationError, match="new: u does not answer, 3 times in a row; it has --timeout=60 sec"):
        unanswered.count(side, missing)


def test_lines_say_what_is_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    printed = ""

    def has_printed(text: str) -> bool:
        nonlocal printed
        printed += capsys.readouterr().err
        return text in printed

    with lines_while_waiting(0.001) as waiting:
        for number in (1, 2):
            waiting.do(f"prompt {number} of 2: waiting for \x1b[2J")
            expected = f"prompt {number} of 2: waiting for "
            wait_until(partial(has_printed, expected), "it is printed")
    assert "\x1b" not in printed + capsys.readouterr().err


@dataclass(frozen=True)
class FakeSide:
    """Answers only if so many ask at once."""

    at_once: threading.Barrier

    def ask(self, prompt: Prompt, output_tokens: int, timeout_s: float) -> Answer:
        self.at_once.wait(30)
        return answer("a", prompt.text, logprob=-0.7)


@pytest.mark.parametrize(("count", "asked"), [(1, 1), (3, 3), (8, 8), (9, 5), (50, 8), (1000, 8)])
def test_the_noise_is_that_of_the_old_version_in_a_batch(count: int, asked: int) -> None:
    prompts = [Prompt(str(number)) for number in range(count)]
    pairs = [compare(prompt.text, answer("a", prompt.text), answer("b")) for prompt in prompts]
    side = cast("Side", FakeSide(threading.Barrier(asked)))
    noise = summarize(_ask_again(prompts, pairs, side, 4, 60))
    assert (noise.compared, noise.changed) == (asked, 0)
    assert noise.mean_shift == pytest.approx(0.2)
    printed = "\n".join(lines(summarize(pairs), noise, pairs))
    assert f"noise        0 of {asked} answers, 0.2000 nats mean change" in printed


def test_a_report_forges_no_line_and_controls_no_terminal() -> None:
    hostile = "\x1b[2J\nchanged      0 of 9 answers\u202e"
    pairs = [
        compare(hostile, answer("a", hostile), answer("a", "b")),
        compare(hostile, answer("a"), Answer(error=hostile)),
    ]
    printed = "\n".join(lines(summarize(pairs), summarize([]), pairs))
    assert "\x1b" not in printed
    assert "\u202e" not in printed
    assert sum(line.startswith("changed ") for line in printed.splitlines()) == 1


def test_the_interval_of_paired_ratios_holds_the_true_median_as_often_as_it_says() -> None:
    chance = random.Random(3)
    held = 0
    for _ in range(400):
        found = PairedRatios.from_values(chance.lognormvariate(0.2, 0.5) for _ in range(30))
        low, high = found.interval
        held += low <= 2.718281828**0.2 <= high
        assert found.confidence >= 0.95
    assert held >= 370
    assert PairedRatios.from_values([1.0, 2.0]).interval == (1.0, 2.0)
    assert len(PairedRatios.from_values(range(1, 3001)).values) == 3000


@pytest.mark.slow
def test_servers_directories_and_versions_are_compared(tmp_path: Path) -> None:
    one, two = make_model(tmp_path / "one"), make_model(tmp_path / "two", echo_delay_ms=5)
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"word{number} b", "max_tokens": 4}) + "\n" for number in range(8)))
    with running(one, workers=1) as server:
        url = f"http://127.0.0.1:{server.port}"
        for version in ("1", "2"):
            registered = {"url": str(two), "model_name": "pair", "model_version": version}
            assert server.http.post("/models", params=registered).status_code == 200
        same = verify(url, url, "--model", "one", "--data", str(data), "--max-changed", "0")
        assert same.returncode == 0, same.stderr
        assert "changed      0 of 8 answers" in same.stdout
        assert "noise        0 of 8 answers" in same.stdout
        versions = ("1", "2", "--server", url, "--model", "pair", "--data", str(data))
        found = verify(*versions, "--json", str(tmp_path / "found.json"))
        assert found.returncode == 0, found.stderr
        said = json.loads((tmp_path / "found.json").read_text())
        assert said["summary"]["changed"] == said["noise"]["changed"] == 0
        assert said["noise"]["compared"] == 8
        slower = verify(url, url, "--model", "nobody", "--data", data)
        assert slower.returncode == 1
        assert "no request was answered before" in slower.stderr
        wrong = verify(url, url, "--set", "option.x=1", "--data", str(data))
        assert "changes a model directory" in wrong.stderr


@pytest.mark.slow
def test_a_directory_that_became_slower_is_found(tmp_path: Path) -> None:
    one = make_model(tmp_path / "one")
    arguments = ("--set", "option.echo_delay_ms=30", "--requests", "8", "--output-tokens", "4", "--max-slower", "1.5")
    found = verify(str(one), str(one), *arguments)
    assert found.returncode == 1, found.stdout
    assert "--max-slower 1.5" in found.stderr
    assert "changed      0 of 8 answers" in found.stdout
