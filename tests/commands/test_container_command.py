"""What the command of the container images runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from lmi_server.commands.cli import app
from lmi_server.commands.container_command import COMMANDS, arguments_of_server, program_of


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((), ["serve"]),
        (("serve",), ["serve"]),
        (("serve", "-m", "x=/a"), ["serve", "-m", "x=/a"]),
        (("djl-serving", "-m", "x=/a"), ["serve", "-m", "x=/a"]),
        (("djl-serving",), ["serve"]),
        (("-m", "x=/a"), ["serve", "-m", "x=/a"]),
        (("-s", "/store", "--port", "1"), ["serve", "-s", "/store", "--port", "1"]),
        (("--help",), ["--help"]),
        (("--version",), ["--version"]),
        (("check", "/a"), ["check", "/a"]),
        (("top",), ["top"]),
        (("no-such-program", "x"), ["no-such-program", "x"]),
        (("nosuch",), ["nosuch"]),
    ],
)
def test_the_servers_own_commands(given: tuple[str, ...], expected: list[str]) -> None:
    assert program_of(given) is None
    assert arguments_of_server(given) == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (("bash",), ["bash"]),
        (("sh", "-c", "a"), ["sh", "-c", "a"]),
        ((sys.executable, "-V"), [sys.executable, "-V"]),
        (("cd / && ls",), ["/bin/sh", "-c", "cd / && ls"]),
    ],
)
def test_any_other_program(given: tuple[str, ...], expected: list[str]) -> None:
    assert program_of(given) == expected


def test_every_command_of_the_server_is_known() -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    assert commands.keys() == COMMANDS


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lmi_server.commands.container_command", *arguments]
    environment = os.environ | {"SERVING_PORT": "0"}  # another program may have port 8080, and its error come first
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=environment)


@pytest.mark.slow
def test_a_container_runs_what_it_is_told(tmp_path: Path) -> None:
    assert run("sh", "-c", "echo $0 $1; exit 3", "a", "b c").stdout == "a b c\n"
    assert run("sh", "-c", "exit 3").returncode == 3
    assert run("echo one; echo two").stdout == "one\ntwo\n"
    for arguments in (("-m", f"x={tmp_path / 'none'}"), ("djl-serving", "-m", f"x={tmp_path / 'none'}")):
        ended = run(*arguments)
        assert (ended.returncode, "none" in ended.stdout + ended.stderr) == (1, True)
    unknown = run("nosuch")
    assert (unknown.returncode, "No such command 'nosuch'" in unknown.stderr) == (2, True)
    assert "Usage: lmi-server" in run("--help").stdout
