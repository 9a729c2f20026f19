"""`lmi-server partition`: weights that were split or quantised ahead of time are served as those that were not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from server_helpers import running
from tiny_models import byte_tokenizer, llama_of_whole_blocks

from lmi_server.configuration.properties import edited_properties

CLI = (sys.executable, "-m", "lmi_server.cli", "partition")
PROMPTS = ("a", "b c d", "the harbour of the town")


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("weights")
    llama_of_whole_blocks().save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return directory


def write(directory: Path, text: str) -> Path:
    directory.mkdir(parents=True)
    (directory / "serving.properties").write_text(text)
    return directory


def partition(directory: Path, target: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*CLI, str(directory), "--save", str(target)], capture_output=True, text=True, check=False)


def tokens(directory: Path) -> list[Any]:
    with running(directory) as server:
        server.log_line(r"\] ready: process")
        return [server.invoke(prompt, 12).json() for prompt in PROMPTS]


SPLIT = """# two ranks
engine=DeepSpeed
option.model_id={weights}
option.rolling_batch=deepspeed
option.dtype=fp32
option.tensor_parallel_degree=2
"""
QUANTIZED = """engine=DeepSpeed
option.model_id={weights}
option.rolling_batch=deepspeed
option.dtype=fp32
option.quantize=smoothquant
option.smoothquant_alpha=0.6
"""
BITSANDBYTES = """engine=Python
option.model_id={weights}
option.dtype=fp32
option.quantize=bitsandbytes{bits}
"""


def test_split_weights_are_served_as_whole_ones(weights: Path, tmp_path: Path) -> None:
    directory = write(tmp_path / "model", SPLIT.format(weights=weights))
    (directory / "notes.txt").write_text("kept")
    target = tmp_path / "split"
    done = partition(directory, target)
    assert done.returncode == 0, done.stderr
    assert "weights of rank 1: " in done.stderr
    assert (target / "serving.properties").read_text() == (
        "# two ranks\nengine=DeepSpeed\noption.rolling_batch=deepspeed\noption.dtype=fp32\n"
        "option.tensor_parallel_degree=2\noption.checkpoint=ds_inference_config.json\n"
    )
    assert (target / "notes.txt").read_text() == "kept"
    assert not (target / "model.safetensors").exists()
    assert tokens(target) == tokens(directory)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_split_weights_are_for_their_number_of_ranks(weights: Path, tmp_path: Path) -> None:
    target = tmp_path / "split"
    assert partition(write(tmp_path / "model", SPLIT.format(weights=weights)), target).returncode == 0
    properties = target / "serving.properties"
    properties.write_text(properties.read_text().replace("degree=2", "degree=1"))
    with running(target) as server:
        server.log_line(r"was split for option\.tensor_parallel_degree=2, and here it is 1; split the model again")


def test_quantised_weights_are_only_loaded(weights: Path, tmp_path: Path) -> None:
    directory = write(tmp_path / "model", QUANTIZED.format(weights=weights))
    target = tmp_path / "int8"
    assert partition(directory, target).returncode == 0
    assert "quantize" not in (target / "serving.properties").read_text()
    assert json.loads((target / "ds_inference_config.json").read_text())["quantization"] == "smoothquant"
    assert tokens(target) == tokens(directory)


@pytest.mark.parametrize("bits", [4, 8])
def test_bitsandbytes_weights_are_only_loaded(bits: int, weights: Path, tmp_path: Path) -> None:
    directory = write(tmp_path / "model", BITSANDBYTES.format(weights=weights, bits=bits))
    target = tmp_path / "quantised"
    done = partition(directory, target)
    assert done.returncode == 0, done.stderr
    assert "quantize" not in (target / "serving.properties").read_text()
    assert json.loads((target / "config.json").read_text())["quantization_config"]["quant_method"] == "bitsandbytes"
    assert (target / "model.safetensors").stat().st_size < (weights / "model.safetensors").stat().st_size * 0.8
    assert tokens(target) == tokens(directory)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("option.model_id={weights}\n", "set option.quantize=bitsandbytes4 or bitsandbytes8"),
        ("engine=DeepSpeed\noption.model_id={weights}\n", "set option.rolling_batch=deepspeed"),
        (
            "engine=DeepSpeed\noption.model_id={weights}\noption.rolling_batch=deepspeed\noption.quantize=dynamic_int8",
            "set option.dtype=fp32, fp16 or bf16",
        ),
        (
            "engine=DeepSpeed\noption.model_id={weights}\noption.rolling_batch=deepspeed\noption.dtype=fp32\n",
            "set option.tensor_parallel_degree above 1, or option.quantize",
        ),
        ("option.entryPoint=djl_python.echo\n", "the handler does neither"),
        (QUANTIZED + "option.quantise=x\noption.dtype=fp33\n", "option.dtype"),
    ],
)
def test_what_cannot_be_prepared_is_refused(text: str, message: str, weights: Path, tmp_path: Path) -> None:
    directory = write(tmp_path / "model", text.format(weights=weights))
    done = partition(directory, tmp_path / "target")
    assert done.returncode == 1
    assert message in done.stderr
    assert not (tmp_path / "target").exists()


def test_a_directory_that_is_there_is_kept(weights: Path, tmp_path: Path) -> None:
    directory = write(tmp_path / "model", QUANTIZED.format(weights=weights))
    done = partition(directory, directory)
    assert (done.returncode, (directory / "serving.properties").exists()) == (1, True)
    assert "is there already" in done.stderr


def test_nothing_is_left_of_a_model_that_cannot_be_loaded(weights: Path, tmp_path: Path) -> None:
    directory = write(tmp_path / "model", QUANTIZED.format(weights=weights).replace("fp32", "fp16"))
    done = partition(directory, tmp_path / "target")
    assert done.returncode == 1
    assert "DeepSpeed has no fp16 on the CPU" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("text", "changes", "expected"),
    [
        ("a=1\n# b=2\nb=3\n", {"b": "4"}, "a=1\n# b=2\nb=4\n"),
        ("a=1\nb=3", {"a": None, "c": "5"}, "b=3\nc=5\n"),
        ("a=1,\\\n  2\nb : x\n", {"a": None}, "b : x\n"),
        ("a=1\n\na=2\n", {"a": "3"}, "a=3\n\n"),
        ("", {"a": "1", "b": None}, "a=1\n"),
    ],
)
def test_what_is_not_changed_stays_as_it_is_written(text: str, changes: dict[str, str | None], expected: str) -> None:
    assert edited_properties(text, changes) == expected
