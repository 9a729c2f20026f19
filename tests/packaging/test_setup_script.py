"""What scripts/setup_environment.py says of machines that it cannot set up, and which torch it chooses."""

from __future__ import annotations

import platform
import re
import sys
from pathlib import Path

import pytest
from fresh_environments import setup_script


@pytest.mark.parametrize(
    ("name", "found", "sentence"),
    [
        ("system", "Darwin", "use a Linux container"),
        ("machine", "riscv64", "x86-64 and 64-bit Arm processors"),
        ("libc_ver", ("", ""), "glibc"),
    ],
)
def test_a_machine_that_cannot_be_set_up_is_refused(
    name: str, found: object, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, name, lambda: found)
    assert sentence in setup_script().missing_of_this_machine()


def test_an_old_python_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 10, 4))
    assert "needs Python 3.11" in setup_script().missing_of_this_machine()


def test_arm_is_set_up_with_a_word_on_what_ran_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert setup_script().missing_of_this_machine() is None
    assert "under an emulator of it only" in capsys.readouterr().out


def test_this_machine_lacks_nothing() -> None:
    assert setup_script().missing_of_this_machine() is None


def test_torch_arguments_decide_before_anything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_ARGS", "--index-url http://127.0.0.1:1/simple")
    arguments, reason = setup_script().choose_torch({}, "2.13.0")
    assert arguments == ["--index-url", "http://127.0.0.1:1/simple", "torch==2.13.0"]
    assert "TORCH_ARGS" in reason


def test_the_versions_of_clients_are_those_of_the_extra() -> None:
    script = setup_script()
    pinned = {line.partition("==")[0] for line in script.CLIENT_CONSTRAINTS.read_text().splitlines()[1:]}
    asked = [*script.extra("clients"), *script.extra("sagemaker")]
    assert pinned == {re.split(r"[^\w-]", requirement)[0] for requirement in asked}


@pytest.mark.slow
def test_what_pip_is_configured_with_reaches_uv(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    configuration = tmp_path / "pip.conf"
    configuration.write_text("[global]\nfind-links = /one\n    /two\nextra-index-url = http://127.0.0.1:1/simple\n")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(configuration))
    script = setup_script()
    settings = script.uv_environment(script.PIP_TO_UV)
    assert (settings["UV_FIND_LINKS"], settings.get("UV_INDEX")) == ("/one /two", None)
    assert script.uv_environment(script.EXTRA_INDEXES)["UV_INDEX"] == "http://127.0.0.1:1/simple"


def test_a_command_has_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = setup_script()
    monkeypatch.setattr(setup, "COMMAND_S", 0.05)
    with pytest.raises(SystemExit, match=r"sleep 60 did not end within 0\.05 seconds; check the network"):
        setup.run(["sleep", "60"])
