"""Every sample in serving.properties.d/ is a configuration that the server takes without a warning."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from lmi_server.configuration.resolve import resolve_model

SAMPLES = sorted((Path(__file__).parent.parent / "serving.properties.d").glob("*.properties"))
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}


def configured(directory: Path, text: str) -> Path:
    """Make a model directory with this serving.properties and a model beside it."""
    (directory / "model").mkdir()
    (directory / "model" / "config.json").write_text(json.dumps(LLAMA))
    (directory / "serving.properties").write_text(text)
    return directory


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: path.stem)
def test_the_sample_is_taken_without_a_warning(sample: Path, tmp_path: Path) -> None:
    resolved = resolve_model(configured(tmp_path, sample.read_text()), {})
    assert resolved.warnings == ()


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: path.stem)
def test_what_the_sample_comments_out_is_taken_as_well(sample: Path, tmp_path: Path) -> None:
    lines = [
        line.removeprefix("#") if line.startswith("#option.") else line for line in sample.read_text().splitlines()
    ]
    resolved = resolve_model(configured(tmp_path, "\n".join(lines)), {})
    assert resolved.warnings == ()


def test_there_is_a_sample_for_every_handler() -> None:
    assert {sample.stem for sample in SAMPLES} >= {"huggingface", "echo"}


def test_a_copied_sample_is_a_model_directory(tmp_path: Path) -> None:
    shutil.copy(SAMPLES[0], tmp_path / "serving.properties")
    assert resolve_model(tmp_path, {}).handler == "handlers.echo:EchoHandler"
