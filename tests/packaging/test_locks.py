"""The locks have every package that a set-up installs, with the version that is asked for and with hashes."""

from __future__ import annotations

import re
import sysconfig
from importlib.metadata import distributions
from pathlib import Path

import pytest
from fresh_environments import setup_script

_ENTRY = re.compile(r"^([\w.-]+)==([^\s;\\]+)[^\n]*\\\n((?: +--hash=sha256:[0-9a-f]{64}(?: \\)?\n?)+)", re.MULTILINE)
# torch and what some builds of it bring; pip is there with the virtual environment; the server itself.
UNLOCKED = {"torch", "triton", "pip", "lmi-server"}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def entries(lock: Path) -> dict[str, str]:
    text = lock.read_text(encoding="utf-8")
    found = {normal(name): version for name, version, _ in _ENTRY.findall(text)}
    assert len(found) == len(re.findall(r"^[\w.-]+==", text, re.MULTILINE)), "an entry has no hash"
    return found


def locked() -> dict[str, str]:
    script = setup_script()
    return {**entries(script.LOCK), **entries(script.BARE_LOCK)}


@pytest.mark.parametrize(
    ("versions", "locks"),
    [("CONSTRAINTS", ("LOCK", "BARE_LOCK")), ("CLIENT_CONSTRAINTS", ("SAGEMAKER_LOCK", "CLIENT_LOCK"))],
)
def test_the_versions_that_are_asked_for_are_locked(versions: str, locks: tuple[str, ...]) -> None:
    script = setup_script()
    lines = getattr(script, versions).read_text(encoding="utf-8").splitlines()
    asked = {normal(line.partition("==")[0]): line.partition("==")[2] for line in lines if "==" in line}
    asked.pop("torch", None)
    found = {name: version for lock in locks for name, version in entries(getattr(script, lock)).items()}
    assert {name: found.get(name) for name in asked} == asked


def test_what_is_installed_is_locked() -> None:
    # Not the whole path: setuptools puts its own copies of packages on it when something imports it.
    site_packages = sysconfig.get_paths()["purelib"]
    installed = {normal(each.metadata["Name"]) for each in distributions(path=[site_packages])}
    of_cuda = {name for name in installed if name.startswith(("nvidia-", "cuda-"))}
    assert installed - of_cuda - UNLOCKED - locked().keys() == set()


def test_uv_is_installed_by_its_hash() -> None:
    text = setup_script().locked("uv")
    assert re.match(r"uv==[\d.]+ \\\n +--hash=sha256:", text)
    assert all(line.startswith((" ", "uv==")) for line in text.splitlines())
