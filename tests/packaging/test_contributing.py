"""The numbered steps of CONTRIBUTING.md, followed literally on a copy of the project.

A step writes a file, adds a text below or above a line of one, or runs a command. Its text is the code under it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from paths import ROOT

COPIED = ("lmi_server", "handlers", "frontend", "tests", "docs", "serving.properties.d", "scripts")
FILES = ("pyproject.toml", "setup.cfg", "README.md", "CONTRIBUTING.md")
SECTIONS = ("Add an engine", "Add a key", "Add a dialect", "Add a feature")

_STEP = re.compile(r"^(\d+)\. +(.*?)(?=^\d+\. |\Z)", re.MULTILINE | re.DOTALL)
_WRITE = re.compile(r"Write `([^`]+)`")
_ADD = re.compile(r"In `([^`]+)`, (below|above) `([^`]+)`,")
_RUN = re.compile(r"Run `([^`]+)`")


@dataclass(frozen=True)
class Step:
    """A numbered step: what it says in one line, and its block of code, without the indentation; "" if it has none."""

    number: int
    says: str
    code: str


def steps_of(section: str, document: str) -> Iterator[Step]:
    """Yield the steps of a section of CONTRIBUTING.md."""
    text = document.split(f"\n## {section}\n", 1)[1].split("\n## ", 1)[0]
    for number, body in _STEP.findall(text):
        says, _, code = body.partition("\n\n")
        block = "".join(line for line in code.splitlines(keepends=True) if line.startswith(" " * 7) or not line.strip())
        yield Step(int(number), " ".join(says.split()), re.sub(r"^ {7}", "", block, flags=re.MULTILINE).strip("\n"))


def follow(step: Step, project: Path) -> None:
    """Do what a step says; raises AssertionError if that cannot be done."""
    if (run := _RUN.match(step.says)) is not None:
        command = run[1].replace(".venv/bin/python", sys.executable)
        environment = {**os.environ, "PYTHONPATH": str(project)}
        done = subprocess.run(
            command, shell=True, cwd=project, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{step.says}\n{done.stdout}{done.stderr}"
    elif (write := _WRITE.match(step.says)) is not None:
        path = project / write[1]
        assert not path.exists(), step.says
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(step.code + "\n", encoding="utf-8")
    else:
        add = _ADD.match(step.says)
        assert add is not None, f"step {step.number} says neither Write nor In nor Run: {step.says}"
        name, place, line = add.groups()
        path = project / name
        before, found, after = path.read_text(encoding="utf-8").partition(line)
        assert found, f"{name} has no line {line!r}"
        rest, _, following = after.partition("\n")
        text = before + found + rest + "\n" + step.code + "\n" + following
        if place == "above":
            start = before.rfind("\n") + 1
            text = before[:start] + step.code + "\n\n" + before[start:] + found + after
        path.write_text(text, encoding="utf-8")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return a copy of what the steps change and test."""
    ignored = shutil.ignore_patterns(".pytest_cache", "*.nb?")  # bytecode is copied: it holds for copies, too
    for name in COPIED:
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    for name in FILES:
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("section", SECTIONS)
def test_the_steps_lead_where_they_say(section: str, project: Path) -> None:
    steps = list(steps_of(section, (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")))
    assert [step.number for step in steps] == list(range(1, len(steps) + 1))
    assert _RUN.match(steps[-1].says), "the last step shows that it works"
    for step in steps:
        follow(step, project)


def test_a_step_without_a_known_verb_or_place_fails(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("first = 1\nlast = 2\n")
    follow(Step(1, "In `a.py`, below `first = `, add:", "middle = 1.5"), tmp_path)
    follow(Step(2, "In `a.py`, above `last`, add:", "late = 1.7"), tmp_path)
    assert (tmp_path / "a.py").read_text() == "first = 1\nmiddle = 1.5\nlate = 1.7\n\nlast = 2\n"
    with pytest.raises(AssertionError, match="has no line"):
        follow(Step(3, "In `a.py`, below `nothing`, add:", ""), tmp_path)
    with pytest.raises(AssertionError, match="says neither"):
        follow(Step(4, "Think about it.", ""), tmp_path)
    with pytest.raises(AssertionError, match="Run"):
        follow(Step(5, "Run `exit 3`.", ""), tmp_path)


def test_the_code_of_a_step_is_its_block() -> None:
    document = textwrap.dedent("""
        ## Add a thing

        1. Write `a.py`,
           which is new:

               def a():
                   return 1

        2. Run `true`.

        ## Style
        3. Not a step of it.
        """)
    assert list(steps_of("Add a thing", document)) == [
        Step(1, "Write `a.py`, which is new:", "def a():\n    return 1"),
        Step(2, "Run `true`.", ""),
    ]
