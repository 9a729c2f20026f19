"""`lmi-server partition`: weights that were split or quantised ahead of time are served as those that were not."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from mpi_helpers import answered, body, clean, generated
from server_helpers import Server
from tiny_models import byte_tokenizer, llama_of_whole_blocks
from transformers import AutoModelForCausalLM

from handlers.checkpoints.loading import load_model
from handlers.deepspeed_engine.loading import load
from handlers.deepspeed_options import DeepSpeedOptions
from handlers.huggingface_options import HuggingFaceOptions
from lmi_server.configuration.properties import edited_properties
from lmi_server.errors import ConfigurationError, ModelLoadError
from lmi_server.partition import partition

PROMPTS = ("a", "b c d", "the harbour of the town")
SPLIT = """# two ranks
engine=DeepSpeed
option.model_id={weights}
option.rolling_batch=deepspeed
option.dtype=fp32
option.tensor_parallel_degree=2
"""
SMOOTH = """engine=DeepSpeed
option.model_id={weights}
option.rolling_batch=deepspeed
option.dtype=fp32
option.quantize=smoothquant
option.smoothquant_alpha=0.6
"""
BITSANDBYTES = """engine=Python
option.model_id={weights}
option.dtype=fp32
option.quantize=bitsandbytes8
"""


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("weights")
    llama_of_whole_blocks().save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return directory


def write(directory: Path, text: str, weights: Path) -> Path:
    directory.mkdir(parents=True)
    (directory / "serving.properties").write_text(text.format(weights=weights))
    return directory


@pytest.fixture(scope="module")
def targets(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What the command makes of a model that is split and of two that are quantised."""
    root = tmp_path_factory.mktemp("models")
    made = {}
    for name, text in {"split": SPLIT, "smooth": SMOOTH, "int8": BITSANDBYTES}.items():
        origin = write(root / "origins" / name, text, weights)
        (origin / "notes.txt").write_text("kept")
        made[name] = root / name
        command = (sys.executable, "-m", "lmi_server.cli", "partition", str(origin), "--save", str(made[name]))
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "MiB written" in done.stderr or "written to" in done.stderr
    assert sorted(path.name for path in root.iterdir()) == ["int8", "origins", "smooth", "split"]
    return made


@pytest.fixture(scope="module")
def served(targets: dict[str, Path]) -> Iterator[Server]:
    with clean(*targets.values()) as server:
        for _ in targets:
            server.log_line(r"\] ready: process")
        yield server


def expected(name: str, weights: Path) -> Any:
    """Return the model as it is without the command."""
    if name == "split":
        return AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32)
    if name == "smooth":
        options = DeepSpeedOptions(dtype="fp32", quantize="smoothquant", smoothquant_alpha=0.6)
        return load(str(weights), options).model
    return load_model(AutoModelForCausalLM, str(weights), HuggingFaceOptions(dtype="fp32", quantize="bitsandbytes8"))


@pytest.mark.parametrize("name", ["split", "smooth", "int8"])
def test_what_was_prepared_is_served_as_what_was_not(name: str, served: Server, weights: Path) -> None:
    model = expected(name, weights)
    answers = [served.http.post(f"/predictions/{name}", json=body(prompt, 12)) for prompt in PROMPTS]
    assert [answered(answer) for answer in answers] == [generated(model, prompt, 12) for prompt in PROMPTS]


def test_a_directory_is_complete(targets: dict[str, Path]) -> None:
    assert (targets["split"] / "serving.properties").read_text() == (
        "# two ranks\nengine=DeepSpeed\noption.rolling_batch=deepspeed\noption.dtype=fp32\n"
        "option.tensor_parallel_degree=2\noption.checkpoint=ds_inference_config.json\n"
    )
    assert not (targets["split"] / "model.safetensors").exists()
    manifest = json.loads((targets["smooth"] / "ds_inference_config.json").read_text())
    assert (manifest["tp_size"], manifest["quantization"]) == (1, "smoothquant")
    quantized = json.loads((targets["int8"] / "config.json").read_text())["quantization_config"]
    assert quantized["quant_method"] == "bitsandbytes"
    for directory in targets.values():
        assert "quantize" not in (directory / "serving.properties").read_text()
        assert (directory / "notes.txt").read_text() == "kept"


def test_4_bit_weights_are_only_loaded(weights: Path, tmp_path: Path) -> None:
    options = HuggingFaceOptions(dtype="fp32", quantize="bitsandbytes4", save_mp_checkpoint_path=str(tmp_path))
    model = load_model(AutoModelForCausalLM, str(weights), options)
    loaded = load_model(AutoModelForCausalLM, str(tmp_path), HuggingFaceOptions(dtype="fp32"))
    assert [generated(loaded, prompt, 12) for prompt in PROMPTS] == [generated(model, prompt, 12) for prompt in PROMPTS]
    assert loaded.get_memory_footprint() == model.get_memory_footprint()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("option.model_id={weights}\n", "set option.quantize=bitsandbytes4 or bitsandbytes8"),
        ("engine=DeepSpeed\noption.model_id={weights}\n", "set option.rolling_batch=deepspeed"),
        (SMOOTH.replace("option.dtype=fp32\n", ""), "set option.dtype=fp32, fp16 or bf16"),
        (SPLIT.replace("degree=2", "degree=1"), "set option.tensor_parallel_degree above 1, or option.quantize"),
        ("option.entryPoint=djl_python.echo\n", "the handler does neither"),
        (SMOOTH + "option.dtype=fp33\n", 'option.dtype = "fp33" is not allowed'),
    ],
)
def test_what_cannot_be_prepared_is_refused(text: str, message: str, weights: Path, tmp_path: Path) -> None:
    directory = write(tmp_path / "model", text, weights)
    with pytest.raises(ConfigurationError, match=message):
        partition(directory, tmp_path / "target", {})
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_directory_that_is_there_is_kept(weights: Path, tmp_path: Path) -> None:
    directory = write(tmp_path / "model", SMOOTH, weights)
    with pytest.raises(ConfigurationError, match="is there already"):
        partition(directory, directory, {})
    assert (directory / "serving.properties").exists()


def test_nothing_is_left_of_a_model_that_cannot_be_loaded(weights: Path, tmp_path: Path) -> None:
    directory = write(tmp_path / "model", SMOOTH.replace("fp32", "fp16"), weights)
    with pytest.raises(ModelLoadError, match="DeepSpeed has no fp16 on the CPU"):
        partition(directory, tmp_path / "target", {})
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("text", "changes", "edited"),
    [
        ("a=1\n# b=2\nb=3\n", {"b": "4"}, "a=1\n# b=2\nb=4\n"),
        ("a=1\nb=3", {"a": None, "c": "5"}, "b=3\nc=5\n"),
        ("a=1,\\\n  2\nb : x\n", {"a": None}, "b : x\n"),
        ("a=1\n\na=2\n", {"a": "3"}, "a=3\n\n"),
        ("", {"a": "1", "b": None}, "a=1\n"),
    ],
)
def test_what_is_not_changed_stays_as_it_is_written(text: str, changes: dict[str, str | None], edited: str) -> None:
    assert edited_properties(text, changes) == edited
