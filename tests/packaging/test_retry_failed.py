"""The second try of tests that failed, and which of them are flaky."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT

from scripts.retry_failed import LIST, failed, main, read_list, report

# It fails the first time, and passes once its file is there.
FLAKY = """\
from pathlib import Path

def test_first():
    seen = Path(__file__).with_name("seen")
    if not seen.exists():
        seen.touch()
        raise AssertionError

def test_always():
    assert True
"""
BROKEN = "def test_broken():\n    assert False\n"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return a project whose list of flaky tests is empty."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / LIST).write_text("# none\n")
    return tmp_path


def run(project: Path, text: str, *arguments: str) -> int:
    """Fail once, as the first run does, then try again."""
    (project / "tests" / "test_it.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-q"]
    assert subprocess.run(command, cwd=project, capture_output=True, check=False).returncode == 1
    return main(arguments, project)


@pytest.mark.slow
def test_a_test_that_passes_only_at_its_second_try_is_named(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(project, FLAKY) == 0
    printed = capfd.readouterr().out
    assert "\nflaky: tests/test_it.py::test_first\n" in printed
    assert "test_always" not in printed  # it had passed, and had no second try


@pytest.mark.slow
def test_continuous_integration_fails_for_a_flaky_test(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(project, FLAKY, "--strict") == 1
    assert f"name it in {LIST} with the reason" in capfd.readouterr().out


@pytest.mark.slow
def test_a_listed_test_may_be_flaky(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (project / LIST).write_text("tests/test_it.py::test_first  # its file\n")
    assert run(project, FLAKY, "--strict") == 0
    assert "flaky: tests/test_it.py::test_first (its file)" in capfd.readouterr().out


@pytest.mark.slow
def test_a_test_that_fails_again_is_not_flaky(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(project, BROKEN) == 1
    assert "flaky:" not in capfd.readouterr().out
    assert failed(project) == {"tests/test_it.py::test_broken"}


def test_a_listed_test_has_a_reason() -> None:
    assert read_list("# a comment\n\ntests/a.py::test[b: #c]  # why\n") == {"tests/a.py::test[b: #c]": "why"}
    with pytest.raises(ValueError, match="has no reason; write `NAME  # REASON`"):
        read_list("tests/a.py::test_b\n")
    assert report({"b", "a"}, {"a": "why"}) == (["flaky: a (why)", "flaky: b"], False)


def test_the_list_names_tests_that_are_there() -> None:
    listed = read_list((ROOT / LIST).read_text())
    assert [name for name in listed if not (ROOT / name.partition("::")[0]).exists()] == []
