"""`lmi-server test-model`: one request to one model, without a server."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from forked_servers import run_command
from own_code_helpers import make_own

from lmi_server.commands.test_model import make_request
from lmi_server.contract.errors import ConfigurationError


def run(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_command(
        "test-model", "--model-dir", str(directory), *arguments, env=os.environ, cwd=directory, libraries="worker"
    )


@pytest.mark.slow
def test_a_model_answers_once(tmp_path: Path) -> None:
    model = make_own(tmp_path / "model", Path("contract"))
    done = run(model, "--input", "a text", "--parameters", "x-case=echo")
    assert (done.returncode, done.stdout) == (0, "a text")
    done = run(model, "--handler", "predict")
    assert (done.returncode, done.stdout) == (0, "predicted")
    done = run(model, "--input", "a", "--parameters", "x-case=raise")
    assert done.returncode == 1
    assert "this one is broken" in done.stdout
    done = run(model, "--handler", "nowhere")
    assert done.returncode == 1
    assert "defines no function nowhere" in done.stderr


def test_inputs_are_files_texts_and_parts(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{}")
    request = make_request([str(tmp_path / "a.json"), "k=v", f"file={tmp_path / 'a.json'}"], ["A=1"])
    assert request.content == [("data", b"{}"), ("k", b"v"), ("file", b"{}")]
    assert request.properties == {"a": "1", "content-type": "application/json"}
    assert make_request(['{"a=": 1}'], []).properties == {"content-type": "application/json"}
    assert make_request([], []).content == [("data", b"")]
    long = "word " * 100  # too long for the name of a file
    assert make_request([long, f"a={long}"], []).content == [("data", long.encode()), ("a", long.encode())]
    with pytest.raises(ConfigurationError, match=r'--parameters "a" is not allowed; allowed: name=value'):
        make_request([], ["a"])
