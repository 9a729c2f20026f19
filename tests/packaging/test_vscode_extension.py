"""The extension for VS Code, whose tests need Node.js alone: no display, no VS Code, no packages."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import pytest
from paths import ROOT

EXTENSION = ROOT / "editors" / "vscode"
NODE = shutil.which("node")


@pytest.mark.skipif(NODE is None, reason="Node.js is not installed: the extension for VS Code is not tested")
def test_the_tests_of_the_extension_pass() -> None:
    assert NODE is not None
    done = subprocess.run(
        [NODE, "--test", "test/"], cwd=EXTENSION, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout
    assert re.search(r"^# pass [1-9]", done.stdout, re.MULTILINE), done.stdout


def test_its_lock_is_that_of_its_manifest() -> None:
    manifest = json.loads((EXTENSION / "package.json").read_text(encoding="utf-8"))
    lock = json.loads((EXTENSION / "package-lock.json").read_text(encoding="utf-8"))
    assert lock["packages"][""]["dependencies"] == manifest["dependencies"]
    assert all("integrity" in package for name, package in lock["packages"].items() if name)
