"""The systemd unit of deploy/: systemd accepts it, and it fits the server. No systemd has started it in a test."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from paths import ROOT

from lmi_server.configuration.server_settings import ServerSettings, resolve_server

UNIT = ROOT / "deploy" / "systemd" / "lmi-server.service"
FILE = ROOT / "deploy" / "systemd" / "lmi-server.env"


def values(name: str) -> list[str]:
    """Return what the unit says for `name`, line by line."""
    lines = UNIT.read_text(encoding="utf-8").splitlines()
    return [line.partition("=")[2] for line in lines if line.startswith(f"{name}=")]


def settings() -> ServerSettings:
    pairs = [pair.partition("=") for line in values("Environment") for pair in line.split()]
    lines = [line.removeprefix("# ") for line in FILE.read_text(encoding="utf-8").splitlines()]
    pairs += [line.partition("=") for line in lines if line.startswith("SERVING_")]
    found, warnings = resolve_server({name: value for name, _, value in pairs}, {})
    assert not warnings
    return found


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd is not installed")
    program = values("ExecStart")[0].split()[0]
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text(encoding="utf-8").replace(program, "/bin/true"), encoding="utf-8")
    done = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_server_takes_its_settings_and_has_the_time_to_end() -> None:
    found = settings()
    [limit] = values("TimeoutStopSec")
    assert float(limit) >= found.drain_timeout + 10
    assert found.api_keys_file is not None
    assert values("KillMode") == ["mixed"], "the server ends its workers itself"


def test_the_steps_of_the_page_bring_what_the_unit_names() -> None:
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    program, _, _, store = values("ExecStart")[0].split()
    [file] = values("EnvironmentFile")
    for named in (program.removesuffix("/.venv/bin/lmi-server"), store, file.removeprefix("-"), UNIT.name, FILE.name):
        assert named in page, named
