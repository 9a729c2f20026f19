"""What chooses the stable_diffusion handler, and what its options allow. Nothing here imports diffusers."""

from __future__ import annotations

from pathlib import Path

import pytest

from handlers.stable_diffusion.options import StableDiffusionOptions
from lmi_server.configuration.resolve import Inspection, inspect_model

INDEX = "model_index.json"


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
    assert StableDiffusionOptions().partitioned() == (
        "set option.quantize=bitsandbytes4 or bitsandbytes8; weights as they are need no preparation"
    )
    changes = StableDiffusionOptions(quantize="bitsandbytes8").partitioned()
    assert isinstance(changes, dict)
    assert changes["option.quantize"] is None
