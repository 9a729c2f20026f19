"""What chooses the stable_diffusion handler, and what its options allow. Nothing here imports diffusers."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from handlers.stable_diffusion.classes import read_index
from handlers.stable_diffusion.options import StableDiffusionOptions
from lmi_server.configuration.engine import describe_engine
from lmi_server.configuration.handlers import HANDLERS
from lmi_server.configuration.resolve import Inspection, inspect_model
from lmi_server.contract.errors import ModelLoadError
from lmi_server.explain.explanation import explain
from lmi_server.machine.inventory import Gpu, Machine

INDEX = "model_index.json"
NO_GPU = Machine(total_bytes=8 * 2**30, available_bytes=8 * 2**30)
ONE_GPU = Machine(total_bytes=8 * 2**30, available_bytes=8 * 2**30, gpus=(Gpu("a", 2**30, 2**30),))


def inspected(directory: Path, location: Path | None = None, **options: str) -> Inspection:
    """Return what is found of a pipeline in `location`, that of the model itself if it is None."""
    (location or directory).mkdir(exist_ok=True)
    (location or directory).joinpath(INDEX).write_text("{}")
    values = {name.replace("__", "."): value for name, value in options.items()}
    if location is not None:
        values["option.model_id"] = str(location)
    return inspect_model(directory, {}, values)


def test_the_index_of_a_pipeline_chooses_the_handler(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    for found in (inspected(tmp_path / "model", tmp_path / "weights"), inspected(tmp_path / "own")):
        assert found.spec.title == "stable_diffusion"
        assert found.handler_reason == "the model directory holds a file of its kind"
        assert found.problems == ()


def test_a_task_chooses_the_handler_before_the_model_is_fetched(tmp_path: Path) -> None:
    found = inspect_model(tmp_path, {}, {"option.model_id": "owner/name", "option.task": "text-to-image"})
    assert (found.spec.title, found.problems, found.unavailable) == ("stable_diffusion", (), ())


@pytest.mark.parametrize("name", ["stable_diffusion", "djl_python.stable_diffusion", "djl_python.stable-diffusion"])
def test_lmi_s_names_of_the_handler(name: str, tmp_path: Path) -> None:
    found = inspected(tmp_path, engine="DeepSpeed", option__entryPoint=name, option__data_type="FP16")
    assert (found.spec.title, found.problems, found.unavailable) == ("stable_diffusion", (), ())
    assert found.options.ranks is None
    assert found.options.engine_arguments() == {"use_safetensors": True, "dtype": "float16"}


def test_a_directory_without_an_index_is_no_pipeline(tmp_path: Path) -> None:
    found = inspect_model(tmp_path, {}, {"option.entryPoint": "djl_python.stable_diffusion"})
    assert found.problems == (
        f"{tmp_path}: holds no {INDEX}; name a model that stable_diffusion serves in option.model_id",
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"option__task": "text-to-video"}, "allowed: auto, text-to-image, image-to-image, inpainting"),
        ({"option__quantize": "awq"}, "allowed: bitsandbytes4, bitsandbytes8"),
        ({"option__width": "4096", "option__height": "4096"}, "which option.max_image_pixels allows"),
        ({"option__num_images_per_prompt": "20"}, "which option.max_images allows"),
        ({"option__enable_cuda_graph": "true"}, "diffusers captures no CUDA graphs"),
        ({"option__rolling_batch": "vllm"}, "allowed: disable, auto"),
    ],
)
def test_what_is_not_served_is_refused_by_name(options: dict[str, str], words: str, tmp_path: Path) -> None:
    found = inspected(tmp_path, None, **{"option__entryPoint": "stable_diffusion", **options})
    lines = [*found.problems, *found.unavailable]
    assert any(words in line for line in lines), lines


def test_keys_without_effect_are_named(tmp_path: Path) -> None:
    given = {"option__use_auth_token": "t", "option__tgi_compat": "true", "option__low_cpu_mem_usage": "true"}
    warnings = inspected(tmp_path, None, **given).warnings
    for key in ("use_auth_token", "tgi_compat", "low_cpu_mem_usage"):
        assert any(f"option.{key}" in text and "has no effect" in text for text in warnings), key


def test_weights_that_are_quantised_can_be_written_ahead_of_time() -> None:
    spec = HANDLERS.by_title("stable_diffusion")
    assert describe_engine(spec, StableDiffusionOptions()).partition({}) == (
        "set option.quantize=bitsandbytes4 or bitsandbytes8; weights as they are need no preparation"
    )
    changes = describe_engine(spec, StableDiffusionOptions(quantize="bitsandbytes8")).partition({})
    assert isinstance(changes, dict)
    assert changes["option.quantize"] is None


def test_the_memory_of_a_pipeline_is_that_of_its_parts(tmp_path: Path) -> None:
    inspected(tmp_path)
    for file in ("unet/a.safetensors", "unet/a.fp16.safetensors", "vae/a.fp16.safetensors"):
        path = tmp_path / file
        path.parent.mkdir(exist_ok=True)
        header = json.dumps({"__metadata__": {}, "w": {"shape": [10, 100], "dtype": "F16", "data_offsets": [0, 2000]}})
        path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(2000))
    memory = {machine: explain(inspect_model(tmp_path, {}, machine=machine)).memory for machine in (NO_GPU, ONE_GPU)}
    assert [one["parameters"] for one in memory.values()] == [2000, 2000]
    assert [one["weights_bytes"] for one in memory.values()] == [8000, 4000]  # fp32 and fp16


def test_check_names_the_gpu_that_quantisation_needs(tmp_path: Path) -> None:
    values = {"option.quantize": "bitsandbytes4"}
    inspected(tmp_path)
    found = [explain(inspect_model(tmp_path, {}, values, machine=machine)).unavailable for machine in (NO_GPU, ONE_GPU)]
    assert ["needs an NVIDIA GPU" in " ".join(lines) for lines in found] == [True, False]
    missing = "stable_diffusion needs the Python package diffusers, which is not installed; run: pip install lmi-server"
    assert any(line.startswith(missing) for line in found[0])


def test_a_header_of_any_form_counts_no_weights(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text("{}")
    long = json.dumps({"w": {"shape": [10**4000] * 1000}})  # its product would take minutes
    for number, header in enumerate(('{"w": {"shape": [1e999]}}', '{"w": {"shape": ["a"]}}', "[" * 100_000, long)):
        (tmp_path / f"part{number}").mkdir()
        data = len(header).to_bytes(8, "little") + header.encode()
        (tmp_path / f"part{number}" / "model.safetensors").write_bytes(data)
    os.mkfifo(tmp_path / "part0" / "pipe.safetensors")
    assert explain(inspect_model(tmp_path, {}, machine=NO_GPU)).memory["parameters"] is None


@pytest.mark.parametrize("content", ["[", "[1]", "[" * 100_000, None], ids=["cut", "list", "deep", "too large"])
def test_an_index_that_cannot_be_read_fails_the_load(tmp_path: Path, content: str | None) -> None:
    (tmp_path / INDEX).write_text(content or "")
    if content is None:
        os.truncate(tmp_path / INDEX, 1 << 40)
    with pytest.raises(ModelLoadError, match=rf"{tmp_path}/{INDEX}: .*; copy it again"):
        read_index(str(tmp_path))
