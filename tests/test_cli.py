"""The command line, run as a user runs it."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest


def lmi_server(*arguments: str, columns: str = "40") -> subprocess.CompletedProcess[str]:
    """Run the command in a narrow terminal with nothing of the tests' environment in it."""
    environment = {"COLUMNS": columns, "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-m", "lmi_server.cli", *arguments]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=environment,
        cwd=Path(__file__).parent.parent,
        timeout=60,
        check=False,
    )


def test_version() -> None:
    result = lmi_server("version")
    assert (result.returncode, result.stdout.strip()) == (0, version("lmi-server"))


def test_help_lists_the_commands() -> None:
    result = lmi_server("--help", columns="100")
    assert result.returncode == 0
    assert all(command in result.stdout for command in ("serve", "version", "demo-model"))


def test_help_of_serve_shows_the_defaults() -> None:
    result = lmi_server("serve", "--help", columns="200")
    assert result.returncode == 0
    assert all(f"(default: {default})" in result.stdout for default in ("127.0.0.1", "8080", "30.0", "info"))


def test_configuration_errors_are_printed_plainly(tmp_path: Path) -> None:
    (tmp_path / "serving.properties").write_text("option.dtype=[bold]\njob_queue_size=0\n")
    result = lmi_server("serve", str(tmp_path), "--port", "0")
    assert result.returncode == 1
    lines = result.stderr.splitlines()
    assert f'{tmp_path}/serving.properties:1: option.dtype = "[bold]" is not allowed; allowed: auto, ' in lines[1]
    assert len(lines) == 3
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--port", "70000"], 'command line: port = "70000" is not allowed; allowed: an integer from 0 to 65535'),
        (
            ["--log-level", "loud"],
            'command line: log_level = "loud" is not allowed; allowed: debug, info, warning, error',
        ),
        (
            ["--drain-timeout", "-1"],
            'command line: drain_timeout = "-1.0" is not allowed; allowed: a number of seconds',
        ),
    ],
)
def test_bad_flags_are_printed_plainly(tmp_path: Path, arguments: list[str], problem: str) -> None:
    result = lmi_server("serve", str(tmp_path), *arguments)
    assert result.returncode == 1
    assert result.stderr.startswith(problem)


def test_a_missing_directory_is_printed_plainly(tmp_path: Path) -> None:
    result = lmi_server("serve", str(tmp_path / "nowhere"))
    assert (result.returncode, result.stderr) == (1, f"{tmp_path / 'nowhere'}: there is no such directory\n")


def test_demo_model_refuses_a_directory_of_somebody_else(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = lmi_server("demo-model", str(tmp_path))
    assert result.returncode == 1
    assert "is not a complete demo model" in result.stderr
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_demo_model_keeps_a_complete_directory(demo_model_dir: Path) -> None:
    result = lmi_server("demo-model", str(demo_model_dir))
    assert (result.returncode, result.stdout.strip()) == (0, f"{demo_model_dir}: complete, nothing to do")
