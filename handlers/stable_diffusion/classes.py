"""What the names and the calls of diffusers' classes say; imports neither torch nor diffusers."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from handlers.stable_diffusion.options import IMAGE_TO_IMAGE, INPAINTING, TEXT_TO_IMAGE
from lmi_server.contract.errors import ModelLoadError
from lmi_server.files.regular_files import read_regular

INDEX = "model_index.json"
CLASS_ENDINGS = {
    TEXT_TO_IMAGE: ("Pipeline",),
    IMAGE_TO_IMAGE: ("Img2ImgPipeline",),
    INPAINTING: ("InpaintPipeline", "InpaintingPipeline"),
}
"""How the name of a class ends, by task; the classes for one kind of weights differ in that alone."""
_ENDING = re.compile(r"(Img2Img|Inpaint|Inpainting)?Pipeline$")

OnStep = Callable[[int, int], None]
"""Gets the number of the step that has ended and the count of all steps; may raise to end the run."""


def read_index(model_dir: str) -> Mapping[str, Any]:
    """Return what diffusers has written about a pipeline. Raises ModelLoadError if it cannot be read."""
    path = Path(model_dir, INDEX)
    if not path.is_file():
        raise ModelLoadError(f"{model_dir}: holds no {INDEX}, so that it is no pipeline of diffusers")
    try:
        index = json.loads(read_regular(path))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path}: cannot be read: {error}; copy it again") from error
    if not isinstance(index, dict):
        raise ModelLoadError(f"{path}: is not a JSON object; copy it again")
    return index


def stem_of(class_name: str) -> str:
    """Return the name of a class without what says its task: StableDiffusion of StableDiffusionImg2ImgPipeline."""
    return _ENDING.sub("", class_name)


def task_of(class_name: str) -> str:
    """Return the task that the name of a class says."""
    ending = class_name.removeprefix(stem_of(class_name))
    return next(task for task, endings in CLASS_ENDINGS.items() if ending in endings)


def defaults_of(function: Callable[..., Any]) -> Mapping[str, Any]:
    """Return the arguments of a call, with their defaults."""
    return {name: one.default for name, one in inspect.signature(function).parameters.items()}


def step_callback(on_step: OnStep) -> Callable[..., dict[str, Any]]:
    """Return diffusers' callback, which is called after each step."""

    def end_of_step(pipeline: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        on_step(step + 1, pipeline.num_timesteps)
        return {}

    return end_of_step
