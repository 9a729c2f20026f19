"""`lmi-server chat`: at a terminal, from a pipe, and with a server that it starts for a model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pseudo_terminal import terminal
from server_helpers import Server, serving
from waiting import wait_until


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Return a server of a model that says the words of the whole chat again and again, each after a while."""
    with serving(tmp_path_factory.mktemp("server"), echo_delay_ms="20") as server:
        yield server


def chat(lines: str, *arguments: str, directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lmi_server", "chat", *arguments],
        input=lines,
        capture_output=True,
        text=True,
        cwd=directory,
        env={**os.environ, "XDG_CACHE_HOME": str(directory / "cache")},
        timeout=120,
    )


def test_lines_come_from_a_pipe(server: Server, tmp_path: Path) -> None:
    """Answers alone go to the standard output; a line that fails is told, and the others are answered."""
    lines = [
        *(
            "/system be",
            "one",
            "two",
            "/set max_tokens many",
            "never",
            "/set max_token 5",
            "/set max_tokens 5",
            "/model nobody",
            "/dance",
        ),
        *("/save chat.json", "/reset", '"""three', 'four"""', "/exit", "unread"),
    ]
    found = chat("\n".join(lines), f"127.0.0.1:{server.port}", "--set", "max_tokens=4", directory=tmp_path)
    assert found.returncode == 1
    first, second = "be one be one", "be one be one"
    assert found.stdout.splitlines() == [f" {first}", f" {second}", " be three four be three"]
    errors = found.stderr.splitlines()
    assert len(errors) == 4
    assert "max_tokens" in errors[0]
    assert errors[1] == '"max_token" is no parameter of a chat; did you mean max_tokens?'
    assert errors[2:] == ["there is no model nobody; there are: model", "/dance is no command; /help lists them"]
    saved = json.loads((tmp_path / "chat.json").read_text())
    assert (saved["model"], saved["max_tokens"]) == ("model", 5)
    assert [(message["role"], message["content"]) for message in saved["messages"]] == [
        *(("system", "be"), ("user", "one"), ("assistant", f" {first}"), ("user", "two"), ("assistant", f" {second}")),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["http://127.0.0.1:1"], "http://127.0.0.1:1 does not answer: "),
        (["--set", "temperature"], '--set "temperature" is not allowed; allowed: name=value'),
        (["--set", "stream=false"], '"stream" is no parameter of a chat; did you mean '),
        (["--set", "zzzzzzz=1"], '"zzzzzzz" is no parameter of a chat; there are: '),
        (["--model", "nobody"], "there is no model nobody; there are: model"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(server: Server, tmp_path: Path, arguments: list[str], message: str) -> None:
    url = [] if arguments[0].startswith("http") else [f"http://127.0.0.1:{server.port}"]
    found = chat("a\n", *url, *arguments, directory=tmp_path)
    assert (found.returncode, found.stdout, found.stderr.count("\n")) == (1, "", 1)
    assert message in found.stderr


@pytest.mark.slow
def test_a_chat_at_a_terminal(server: Server, tmp_path: Path) -> None:
    """Ctrl-C ends the answer, which the server stops, and not the chat; lines are remembered for the next one."""
    variables = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    url = f"http://127.0.0.1:{server.port}"
    with terminal("chat", url, "--set", "max_tokens=100000", variables=variables) as shown:
        shown.until("/help lists the commands")
        shown.until("> ")
        shown.type("endless\r")
        shown.until(" endless endless endless")
        shown.type("\x03")
        shown.until("ended")
        server.until("lmi_requests_in_flight", 0)
        shown.until("> ")
        shown.type("/set max_tokens 3\r")
        shown.until("max_tokens = 3")
        shown.until("> ")
        shown.type("/reset\r")
        shown.until("> ")
        shown.type("short\r")
        shown.until(" short short short")
        shown.until("3 tokens, the first after ")
        shown.until("> ")
        shown.type("half a line")
        shown.until("half a line")
        shown.type("\x03")
        shown.until("Ctrl-D or /exit ends", keys="\x03")  # Python loses one that comes between two waits for keys
        shown.until("> ")
        shown.type("\x1b[A")
        shown.until("short")
        shown.type("\x15\x04")
        assert shown.ended() == 0
    assert "endless" in (tmp_path / "lmi-server" / "chat-history").read_text().splitlines()


@pytest.mark.slow
def test_a_server_is_started_for_a_model_and_ends_with_the_chat(tmp_path: Path) -> None:
    model = tmp_path / "my-model"
    model.mkdir()
    (model / "serving.properties").write_text("option.entryPoint=echo\n")
    found = chat("hi\n/model\n", "my-model", "--set", "max_tokens=2", directory=tmp_path)
    assert (found.returncode, found.stdout) == (0, " hi hi\n* my_model\n"), found.stderr
    wait_until(lambda: not _servers_below(tmp_path), "the server has ended")


@pytest.mark.slow
def test_a_model_that_does_not_load_is_told(tmp_path: Path) -> None:
    (tmp_path / "serving.properties").write_text("option.entryPoint=nowhere.py\n")
    found = chat("hi\n", ".", directory=tmp_path)
    assert (found.returncode, found.stdout) == (1, "")
    assert "nowhere.py" in found.stderr


def _servers_below(directory: Path) -> list[str]:
    """Return the processes whose working directory this is."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(process / "cwd") == str(directory):
                found.append(process.name)
        except OSError:
            continue
    return found
