"""`lmi-server partition`: weights that were split or quantised ahead of time are served as those that were not."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from forked_servers import ForkedCommand, forked_workers
from mpi_helpers import answered, body, clean, generated
from process_log import LIMIT_S

from handlers.deepspeed.options import DeepSpeedOptions
from handlers.huggingface.options import HuggingFaceOptions
from lmi_server.commands.partition import _other_files, partition
from lmi_server.configuration.resolve import resolve_model
from lmi_server.contract.errors import ConfigurationError, ModelLoadError
from lmi_server.serving.models.model_store import named_source

pytestmark = pytest.mark.slow

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
    from tiny_models import llama_of_whole_blocks, saved_model

    return saved_model(llama_of_whole_blocks(), tmp_path_factory.mktemp("weights"))


def write(directory: Path, text: str, weights: Path) -> Path:
    directory.mkdir(parents=True)
    (directory / "serving.properties").write_text(text.format(weights=weights))
    return directory


@pytest.fixture(scope="module")
def target(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the command makes of a model for two ranks."""
    root = tmp_path_factory.mktemp("models")
    origin = write(root / "origin", SPLIT, weights)
    (origin / "notes.txt").write_text("kept")
    command = ForkedCommand(["partition", str(origin), "--save", str(root / "split")], os.environ, root, "deepspeed")
    with command.stdout, command.stderr:
        errors = command.stderr.read()
    assert command.wait(LIMIT_S) == 0, errors
    assert "weights of rank 1: 0.2 of 0.2 MiB written" in errors
    assert sorted(path.name for path in root.iterdir()) == ["origin", "split"]
    return root / "split"


def test_a_model_that_was_split_is_served_as_the_whole_one(target: Path, weights: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32)
    with clean(target, libraries="deepspeed") as server:
        server.log_line(r"\] ready: process")
        answers = [server.http.post("/invocations", json=body(prompt, 12)) for prompt in PROMPTS]
    assert [answered(answer) for answer in answers] == [generated(model, prompt, 12) for prompt in PROMPTS]


def test_a_directory_is_complete(target: Path) -> None:
    assert (target / "serving.properties").read_text() == (
        "# two ranks\nengine=DeepSpeed\noption.rolling_batch=deepspeed\noption.dtype=fp32\n"
        "option.tensor_parallel_degree=2\noption.checkpoint=ds_inference_config.json\n"
    )
    assert not (target / "model.safetensors").exists()
    assert (target / "tokenizer.json").exists()
    assert (target / "notes.txt").read_text() == "kept"
    assert json.loads((target / "ds_inference_config.json").read_text())["tp_size"] == 2


@pytest.mark.parametrize("method", ["dynamic_int8", "smoothquant"])
def test_8_bit_weights_are_only_loaded(method: str, weights: Path, tmp_path: Path) -> None:
    from handlers.deepspeed.model import load

    save = DeepSpeedOptions(dtype="fp32", quantize=method, save_mp_checkpoint_path=str(tmp_path))
    model = load(str(weights), save).model
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(weights / name, tmp_path)
    kept = load(str(tmp_path), DeepSpeedOptions(checkpoint="ds_inference_config.json"))
    assert same_tokens(kept.model, model)
    assert kept.details["quantization"] == method


@pytest.mark.parametrize("method", ["bitsandbytes4", "bitsandbytes8"])
def test_weights_of_bitsandbytes_are_only_loaded(method: str, weights: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from handlers.checkpoints.transformers_loading import load_model

    options = HuggingFaceOptions(dtype="fp32", quantize=method, save_mp_checkpoint_path=str(tmp_path))
    model = load_model(AutoModelForCausalLM, str(weights), options)
    kept = load_model(AutoModelForCausalLM, str(tmp_path), HuggingFaceOptions(dtype="fp32"))
    assert same_tokens(kept, model)
    assert (tmp_path / "model.safetensors").stat().st_size < (weights / "model.safetensors").stat().st_size * 0.8


def same_tokens(one: Any, other: Any) -> bool:
    return all(generated(one, prompt, 12) == generated(other, prompt, 12) for prompt in PROMPTS)


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        (BITSANDBYTES, {"option.model_id": None, "option.quantize": None}),
        (BITSANDBYTES.replace("bitsandbytes8", "q4_0"), {"option.model_id": None, "option.quantize": None}),
        (SMOOTH, {"option.quantize": None, "option.smoothquant_alpha": None, "option.tensor_parallel_degree": "1"}),
    ],
)
def test_keys_that_are_done_with_are_removed(
    text: str, changes: dict[str, str | None], weights: Path, tmp_path: Path
) -> None:
    partitioned = resolve_model(write(tmp_path / "model", text, weights), {}).engine.partition({})
    assert not isinstance(partitioned, str)
    assert changes.items() <= dict(partitioned).items()


@pytest.mark.parametrize(
    ("method", "reason"),
    [("gptq", None), ("awq", None), ("compressed-tensors", None), ("blocks", "quantised with blocks already"),
     ("bitsandbytes", "quantised with bitsandbytes already"), (7, "quantised with 7 already")],
)  # fmt: skip
def test_packed_checkpoints_need_no_key(method: Any, reason: str | None, weights: Path, tmp_path: Path) -> None:
    model = resolve_model(write(tmp_path / "model", "option.model_id={weights}\n", weights), {})
    changes = model.engine.partition({"quantization_config": {"quant_method": method}})
    assert reason in changes if reason else dict(changes).keys() >= {"option.model_id", "option.quantize"}


def test_a_directory_with_blocks_is_complete(tmp_path: Path) -> None:
    from packed_models import packed_llama
    from transformers import AutoModelForCausalLM

    from handlers.checkpoints.transformers_loading import load_model, load_tokenizer

    packed_llama(tmp_path / "weights", act_order=True)
    text = "option.model_id={weights}\noption.dtype=fp32\noption.quantize=gptq\n"
    directory, target = write(tmp_path / "model", text, tmp_path / "weights"), tmp_path / "target"
    with forked_workers("deepspeed"):
        partition(named_source(str(directory)), target, {})
    assert (target / "serving.properties").read_text() == "option.dtype=fp32\n"
    options = HuggingFaceOptions(dtype="fp32")
    kept, packed = (load_model(AutoModelForCausalLM, str(path), options) for path in (target, tmp_path / "weights"))
    assert same_tokens(kept, packed)
    assert (
        load_tokenizer(str(target), options).get_vocab()
        == load_tokenizer(str(tmp_path / "weights"), options).get_vocab()
    )


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
        partition(named_source(str(directory)), tmp_path / "target", {})
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_directory_that_is_there_is_kept(weights: Path, tmp_path: Path) -> None:
    directory = write(tmp_path / "model", SMOOTH, weights)
    with pytest.raises(ConfigurationError, match="exists already"):
        partition(named_source(str(directory)), directory, {})
    assert (directory / "serving.properties").exists()


def test_nothing_is_left_of_a_model_that_cannot_be_loaded(weights: Path, tmp_path: Path) -> None:
    directory = write(tmp_path / "model", SMOOTH.replace("fp32", "fp16"), weights)
    with pytest.raises(ModelLoadError, match="DeepSpeed has no fp16 on the CPU"):
        partition(named_source(str(directory)), tmp_path / "target", {})
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_weights_stay_behind_where_the_load_has_written_them_in_another_form(tmp_path: Path) -> None:
    """A compiled pipeline has graphs in the folders of its parts; other folders keep the weights that they had."""
    names = ("unet/config.json", "unet/a.fp16.safetensors", "dense/a.safetensors", "a.safetensors", "tokenizer/v.json")
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    copied = {str(path.relative_to(tmp_path)) for path in _other_files(tmp_path, {Path(), Path("unet")})}
    assert copied == {"unet/config.json", "dense/a.safetensors", "tokenizer/v.json"}
