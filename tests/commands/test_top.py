"""`lmi-server top`: the figures that follow from two looks at a server, and the table in and without a terminal."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked_servers import run_command
from pseudo_terminal import terminal
from server_helpers import Server, make_model, running, serving

from lmi_server.commands.live.model_figures import figures, parse

BEFORE = """
# HELP lmi_queue_depth Requests that wait for a worker.
lmi_queue_depth{model="a:1"} 2.0
lmi_requests_in_flight{model="a:1"} 4.0
lmi_workers{model="a:1",state="ready"} 2.0
lmi_workers{model="a:1",state="starting"} 1.0
lmi_handler_generated_tokens_total{model="a:1",worker="a:1-0"} 100.0
lmi_handler_generated_tokens_total{model="a:1",worker="a:1-1"} 50.0
lmi_handler_kv_cache_usage{model="a:1",worker="a:1-0"} 0.25
lmi_handler_kv_cache_usage{model="a:1",worker="a:1-1"} 0.5
lmi_output_tokens_total{adapter="",model="a:1"} 7.0
lmi_output_tokens_total{adapter="",model="b"} 7.0
lmi_prompt_tokens_total{adapter="",model="a:1"} 100.0
lmi_cached_prompt_tokens_total{adapter="",model="a:1"} 0.0
lmi_time_to_first_token_seconds_bucket{le="0.1",model="a:1"} 10.0
lmi_time_to_first_token_seconds_bucket{le="0.2",model="a:1"} 10.0
lmi_time_to_first_token_seconds_bucket{le="+Inf",model="a:1"} 10.0
"""
AFTER = """
lmi_requests_in_flight{model="a:1"} 4.0
lmi_handler_generated_tokens_total{model="a:1",worker="a:1-0"} 160.0
lmi_handler_generated_tokens_total{model="a:1",worker="a:1-1"} 70.0
lmi_output_tokens_total{adapter="",model="b"} 3.0
lmi_prompt_tokens_total{adapter="",model="a:1"} 150.0
lmi_prompt_tokens_total{adapter="x",model="a:1"} 50.0
lmi_cached_prompt_tokens_total{adapter="",model="a:1"} 25.0
lmi_time_to_first_token_seconds_bucket{le="0.1",model="a:1"} 10.0
lmi_time_to_first_token_seconds_bucket{le="0.2",model="a:1"} 30.0
lmi_time_to_first_token_seconds_bucket{le="+Inf",model="a:1"} 30.0
"""
STATES = {"b": "READY", "a:1": "READY", "late": "PENDING"}


def test_figures_are_those_between_two_looks() -> None:
    before, after = parse(BEFORE, STATES, 10.0), parse(AFTER, STATES, 14.0)
    busy, other, late = figures(after, before, before)
    assert [each.label for each in (busy, other, late)] == ["a:1", "b", "late"], "the busiest first"
    assert busy.tokens_per_s == 20, "80 tokens of both workers in 4 seconds, as their handlers count them"
    assert other.tokens_per_s == 3 / 4, "a counter that fell began again at 0"
    assert (late.state, late.tokens_per_s, late.running) == ("PENDING", None, 0)
    assert busy.first_token_s == (pytest.approx(0.15), pytest.approx(0.195)), "of the 20 between 0.1 and 0.2 s"
    assert busy.token_gap_s == (None, None)
    assert busy.prefix_hits == 25 / 100
    (first,) = [each for each in figures(before, None, None) if each.label == "a:1"]
    assert (first.tokens_per_s, first.running, first.queued, first.kv_usage) == (None, 4, 2, 0.5)
    assert first.workers == {"ready": 2, "starting": 1}
    assert first.first_token_s[0] == pytest.approx(0.05), "all that there are since the server began"


def test_a_label_with_quotes_is_read_as_it_was() -> None:
    found = parse('lmi_queue_depth{model="a\\"b\\\\n,c\\n"} 1.0', {}, 0.0)
    assert found.values["lmi_queue_depth"] == {'a"b\\n,c\n': 1.0}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("server")) as server:
        assert server.invoke("a b").status_code == 200
        yield server


def test_without_a_terminal_it_prints_one_table(server: Server, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{server.port}"
    found = run_command("top", url, "--interval", "0.1", env=dict(os.environ), cwd=tmp_path)
    assert (found.returncode, found.stderr) == (0, "")
    head, row = found.stdout.splitlines()
    assert head.split()[:6] == ["model", "state", "workers", "running", "queue", "tokens/s"]
    assert row.split()[:6] == ["model", "READY", "1", "0", "0", "0.0"]
    assert " ms " in row, "the time of the first token, since the server began"


@pytest.mark.parametrize(
    ("url", "message"), [("http://127.0.0.1:1", "does not answer"), ("gopher://x", "is no URL of a server")]
)
def test_what_is_wrong_is_said_in_one_line(tmp_path: Path, url: str, message: str) -> None:
    found = run_command("top", url, env=dict(os.environ), cwd=tmp_path)
    assert (found.returncode, found.stdout, found.stderr.count("\n")) == (1, "", 1)
    assert message in found.stderr


@pytest.mark.parametrize("status", ["500 No", "200 OK"])
def test_an_answer_that_is_cut_is_said_in_one_line(tmp_path: Path, status: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(f"HTTP/1.1 {status}\r\ncontent-length: 9\r\n\r\n{{}}".encode())

        answering = threading.Thread(target=answer)
        answering.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        found = run_command("top", url, env=dict(os.environ), cwd=tmp_path)
        answering.join()
    assert (found.returncode, found.stdout, found.stderr.count("\n")) == (1, "", 1)
    assert f"{url} does not answer: IncompleteRead" in found.stderr


def test_a_server_that_wants_a_key_has_the_flag_named(tmp_path: Path) -> None:
    variables = dict.fromkeys(("SERVING_API_KEYS", "SERVING_MANAGEMENT_API_KEYS"), "key-0123456789")
    with running(make_model(tmp_path / "model"), variables=variables, workers=1) as server:
        url = f"http://127.0.0.1:{server.port}"
        for command in (["top", url], ["reload", "--url", url], ["chat", url], ["advise", url, "--seconds", "0"]):
            refused = run_command(*command, env=dict(os.environ), cwd=tmp_path)
            assert (refused.returncode, "--header 'x-api-key: KEY' sends a key" in refused.stderr) == (1, True), command
        accepted = run_command("top", url, "--header", "x-api-key: key-0123456789", env=dict(os.environ), cwd=tmp_path)
        assert accepted.returncode == 0


def test_the_table_lives_in_a_terminal_until_q(server: Server) -> None:
    url = f"http://127.0.0.1:{server.port}"
    with terminal("top", url, "--interval", "0.2", variables=os.environ, columns=90) as shown:
        shown.until("percentiles since the start")
        assert "TTFT p95" not in shown.until("READY"), "a narrow terminal has no room for every column"
        shown.until("percentiles of the last")
        shown.until("q ends")
        shown.type("xq")
        assert shown.ended() == 0
