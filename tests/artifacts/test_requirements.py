"""`requirements.txt` of a model, installed by the real pip from wheels that the tests write; no index is asked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from artifact_helpers import Recorder, write_wheel

from lmi_server.artifacts.progress import Activity
from lmi_server.artifacts.requirements import Installer, install_requirements
from lmi_server.contract.errors import ArtifactError


def installer(root: Path, limit_s: float = 120.0, **variables: str) -> Installer:
    # An index that is not there, so that only what a test offers can be found.
    isolated = {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": "http://127.0.0.1:1/simple", "PIP_RETRIES": "0"}
    environment = {"PATH": os.environ["PATH"], "HOME": str(root), **isolated, **variables}
    return Installer(sys.executable, environment, limit_s, root / "downloads")


def model(tmp_path: Path, requirements: str) -> Path:
    directory = tmp_path / "model"
    directory.mkdir(exist_ok=True)
    (directory / "requirements.txt").write_text(requirements)
    return directory


def imported(target: Path, expression: str) -> str:
    """Return what a worker sees that has `target` on its PYTHONPATH."""
    module = expression.partition(".")[0]
    command = [sys.executable, "-c", f"import {module}; print({expression})"]
    return subprocess.run(command, env={"PYTHONPATH": str(target)}, capture_output=True, text=True, check=True).stdout


def test_without_the_file_nothing_happens(tmp_path: Path) -> None:
    assert install_requirements(tmp_path, installer(tmp_path), Activity()) is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["wheelhouse", "requirements"])
def test_a_wheelhouse_is_enough(tmp_path: Path, folder: str) -> None:
    directory = model(tmp_path, "tinyone>=1  # with a comment\npytest\n")
    write_wheel(directory / folder, "tinyone", "1.0", "value = 1", requires="tinytwo")
    write_wheel(directory / folder, "tinytwo", "2.0", "value = 2")
    activity = Recorder()
    target = install_requirements(directory, installer(tmp_path), activity)
    assert target is not None
    assert imported(target, "tinyone.value").strip() == "1"
    assert imported(target, "tinytwo.value").strip() == "2"
    assert not (target / "pytest").exists(), "the interpreter has it"
    assert activity.seen[0].what == f"installing {directory / 'requirements.txt'}"


@pytest.mark.slow
def test_it_is_installed_once_for_each_state_of_the_files(tmp_path: Path) -> None:
    directory = model(tmp_path, "-r more.txt\n./wheels/tinyone-1.0-py3-none-any.whl\n")
    (directory / "more.txt").write_text("\n")
    write_wheel(directory / "wheels", "tinyone", "1.0", "value = 1")
    first = install_requirements(directory, installer(tmp_path), Activity())
    again = Recorder()
    assert install_requirements(directory, installer(tmp_path), again) == first
    assert again.seen == []
    write_wheel(directory / "wheels", "tinyone", "1.0", "value = 'new'")
    second = install_requirements(directory, installer(tmp_path), Activity())
    assert first is not None
    assert second is not None
    assert (imported(first, "tinyone.value"), imported(second, "tinyone.value")) == ("1\n", "new\n")
    (directory / "more.txt").write_text("pytest\n")
    assert install_requirements(directory, installer(tmp_path), Activity()) not in (first, second)


@pytest.mark.slow
def test_lmi_s_folder_comes_before_the_index(tmp_path: Path) -> None:
    directory = model(tmp_path, "tinyone\ntinytwo\n")
    write_wheel(directory / "requirements", "tinyone", "1.0", "value = 1")
    write_wheel(tmp_path / "index", "tinytwo", "2.0", "value = 2")
    target = install_requirements(directory, installer(tmp_path, PIP_FIND_LINKS=str(tmp_path / "index")), Activity())
    assert target is not None
    assert imported(target, "tinytwo.value").strip() == "2"


@pytest.mark.slow
def test_pip_s_reason_is_in_the_error(tmp_path: Path) -> None:
    directory = model(tmp_path, "tinyone==3.0\n")
    write_wheel(directory / "wheelhouse", "tinyone", "1.0")
    with pytest.raises(ArtifactError) as failure:
        install_requirements(directory, installer(tmp_path), Activity())
    message = failure.value.message
    assert message.startswith(f"{directory / 'requirements.txt'}: pip could not install it (exit code 1): ")
    assert "Could not find a version that satisfies the requirement tinyone==3.0 (from versions: 1.0)" in message
    assert "\n" not in message
    write_wheel(directory / "wheelhouse", "tinyone", "3.0")
    assert install_requirements(directory, installer(tmp_path), Activity()) is not None


@pytest.mark.slow
def test_a_line_that_is_no_requirement_is_an_error(tmp_path: Path) -> None:
    directory = model(tmp_path, "what is this?\n")
    with pytest.raises(ArtifactError, match=r"Invalid requirement: 'what is this\?'"):
        install_requirements(directory, installer(tmp_path), Activity())


def test_pip_has_a_time_limit(tmp_path: Path) -> None:
    directory = model(tmp_path, "tinyone\n")
    with pytest.raises(ArtifactError, match=r"did not end within model_loading_timeout=0 seconds; raise it, or put"):
        install_requirements(directory, installer(tmp_path, limit_s=0), Activity())


def test_an_interpreter_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    missing = Installer(str(tmp_path / "python"), {}, 1.0, tmp_path)
    with pytest.raises(ArtifactError, match="python"):
        install_requirements(model(tmp_path, ""), missing, Activity())


def test_a_wheel_that_never_ends_is_not_read_whole_and_can_be_cancelled(tmp_path: Path) -> None:
    directory, activity = model(tmp_path, "tinyone\n"), Activity()
    wheel = directory / "wheelhouse" / "tinyone-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    with wheel.open("wb") as file:
        file.truncate(1 << 42)
    activity.cancel()
    with pytest.raises(ArtifactError, match="cancelled"):
        install_requirements(directory, installer(tmp_path), activity)
