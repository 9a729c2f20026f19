"""Runs a pipeline of diffusers on Neuron cores; the calls are for optimum-neuron 0.4.5.

Its graphs draw images of one size, for one number of prompts, with one number of images for each. A run always draws
all of them, and what no request asked for is thrown away.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from optimum import neuron

from handlers.checkpoints.saving import saving
from handlers.neuron_failures import failures_of_load, failures_of_step
from handlers.stable_diffusion.classes import (
    CLASS_ENDINGS,
    OnStep,
    defaults_of,
    read_index,
    stem_of,
    step_callback,
    task_of,
)
from handlers.stable_diffusion.neuron_options import NeuronImageOptions
from handlers.stable_diffusion.requests import Drawing, Mode
from handlers.step_loop import EngineLostError
from lmi_server.contract.errors import ModelLoadError, RequestError

logger = logging.getLogger(__name__)

_LIBRARY = "optimum-neuron"
_GRAPH = "model.neuron"  # a file beside the configuration of each part that was compiled
_STEMS = ("StableDiffusion", "StableDiffusionXL")
_SIZES = "option.height, option.width, option.compiled_batch_size or option.num_images_per_prompt"


@dataclass(frozen=True)
class _Row:
    """One prompt of a run, which draws the images `first` up to `end` of a drawing."""

    drawing: Drawing
    first: int
    end: int

    def seeds(self, count: int) -> Sequence[int]:
        """Return `count` seeds; the images behind its own are thrown away."""
        own = self.drawing.seeds[self.first : self.end]
        return [*own, *[own[-1]] * (count - len(own))]


class NeuronPipelines:
    """One compiled pipeline, which does one task."""

    multiple = 1

    def __init__(self, model_dir: str, options: NeuronImageOptions) -> None:
        """Load the graphs in a directory, or compile them. Raises ModelLoadError."""
        compiled = Path(model_dir, "unet", _GRAPH).is_file()
        name, self._task = _class_for(model_dir, options.task, compiled)
        self._pipeline = _load(name, model_dir, options, compiled)
        self.size = _compiled_size(self._pipeline)
        self._prompts = int(self._pipeline.neuron_configs["text_encoder"].batch_size)
        self._per_prompt = int(self._pipeline.num_images_per_prompt)
        self._check(model_dir, options)
        self._pipeline.set_progress_bar_config(disable=True)
        self.modes: Mapping[str, Mode] = {
            self._task: Mode(name, defaults_of(self._pipeline.auto_model_class.__call__)),
        }
        self.details: Mapping[str, Any] = {
            "library": _LIBRARY,
            "pipeline": name,
            "tasks": self._task,
            "dtype": options.dtype,
            "neuron_cores": options.tensor_parallel_degree,
            "size": f"{self.size[0]} x {self.size[1]}",
            "prompts_of_a_run": self._prompts,
            "images_per_prompt": self._per_prompt,
            "graphs": model_dir if compiled else "compiled now",
        }
        if options.save_mp_checkpoint_path is not None:
            with saving(options.save_mp_checkpoint_path):
                self._pipeline.save_pretrained(options.save_mp_checkpoint_path)

    def draw(self, drawings: Sequence[Drawing], on_step: OnStep) -> list[list[Any]]:
        """Return the images of each drawing; they are of one group, and run together as far as the graphs allow.

        Raises ValueError if the pipeline cannot draw one of them, and whatever `on_step` raises.
        """
        rows = [row for drawing in drawings for row in _rows(drawing, self._per_prompt)]
        runs = (rows[first : first + self._prompts] for first in range(0, len(rows), self._prompts))
        drawn = iter([image for run in runs for image in self._run(run, on_step)])
        return [[next(drawn) for _ in drawing.seeds] for drawing in drawings]

    def add_adapter(self, name: str, directory: str) -> None:
        """Refuse an adapter. Raises RequestError."""
        raise RequestError("a model with compiled graphs takes no LoRA adapters; merge the adapter into the model")

    def remove_adapter(self, name: str) -> None:
        """Do nothing: there are no adapters."""

    def _run(self, rows: Sequence[_Row], on_step: OnStep) -> Iterator[Any]:
        """Yield the images of `rows`, one after the other. Ends the process if a Neuron core fails."""
        try:
            with failures_of_step(), torch.inference_mode():
                images = self._pipeline(**self._arguments(rows, on_step)).images
        except EngineLostError as error:
            logger.critical("%s; this worker ends, and a new one takes over", error)
            raise SystemExit(1) from error
        for number, row in enumerate(rows):
            first = number * self._per_prompt
            yield from images[first : first + row.end - row.first]

    def _arguments(self, rows: Sequence[_Row], on_step: OnStep) -> dict[str, Any]:
        drawing = rows[0].drawing
        full = [*rows, *[rows[-1]] * (self._prompts - len(rows))]
        arguments: dict[str, Any] = {
            **drawing.arguments,
            **{name: [row.drawing.texts[name][row.first] for row in full] for name in drawing.texts},
            "num_images_per_prompt": self._per_prompt,
            "output_type": "pil",
            "generator": [torch.Generator().manual_seed(seed) for row in full for seed in row.seeds(self._per_prompt)],
            "callback_on_step_end": step_callback(on_step),
        }
        if drawing.image is not None:
            arguments["image"] = [row.drawing.image for row in full]
        if drawing.mask is not None:
            arguments["mask_image"] = [row.drawing.mask for row in full]
        return arguments

    def _check(self, model_dir: str, options: NeuronImageOptions) -> None:
        """Refuse graphs that were compiled for other sizes than the options have."""
        asked = {
            "option.width": (options.width, self.size[0]),
            "option.height": (options.height, self.size[1]),
            "option.compiled_batch_size": (options.compiled_batch_size, self._prompts),
            "option.num_images_per_prompt": (options.num_images_per_prompt, self._per_prompt),
        }
        wrong = [f"{key}={has} in place of {wanted}" for key, (wanted, has) in asked.items() if wanted != has]
        if wrong:
            raise ModelLoadError(
                f"{model_dir} was compiled for other sizes; set {', '.join(wrong)}, or compile it again"
            )


def _class_for(model_dir: str, wanted: str, compiled: bool) -> tuple[str, str]:
    """Return the name of optimum-neuron's class and its task. Raises ModelLoadError."""
    name = str(read_index(model_dir).get("_class_name")).removeprefix("Neuron")
    stem = stem_of(name)
    if stem not in _STEMS:
        raise ModelLoadError(
            f"{model_dir} is a {name}, and on Neuron cores only StableDiffusionPipeline, StableDiffusionXLPipeline and"
            " their forms for images and masks are served; use option.entryPoint=djl_python.stable_diffusion on a GPU"
        )
    task = task_of(name) if wanted == "auto" else wanted
    if compiled and task != task_of(name):
        raise ModelLoadError(
            f"option.task={wanted}: {model_dir} was compiled for {task_of(name)}; remove the key, or compile it again"
        )
    return f"Neuron{stem}{CLASS_ENDINGS[task][0]}", task


def _load(name: str, model_dir: str, options: NeuronImageOptions, compiled: bool) -> Any:
    arguments = {**options.engine_arguments(), "torch_dtype": getattr(torch, options.engine_arguments()["torch_dtype"])}
    with failures_of_load(_LIBRARY, model_dir, _SIZES):
        kind = getattr(neuron, name)
        if compiled:
            return kind.from_pretrained(model_dir, local_files_only=True)
        pipeline = kind.from_pretrained(model_dir, export=True, local_files_only=True, **arguments)
    if pipeline is None:  # without a device it compiles and returns nothing
        raise ModelLoadError(f"{_LIBRARY} found no Neuron device to load {model_dir} on; use a machine with one")
    return pipeline


def _compiled_size(pipeline: Any) -> tuple[int, int]:
    """Return width and height of the images that the graphs make."""
    shapes, scale = pipeline.unet.config.neuron, pipeline.vae_scale_factor
    return shapes["static_width"] * scale, shapes["static_height"] * scale


def _rows(drawing: Drawing, most: int) -> Iterator[_Row]:
    """Yield the prompts of a drawing, each with up to `most` images."""
    prompts = list(zip(*drawing.texts.values(), strict=True))
    first = 0
    for at in range(1, len(prompts) + 1):
        if at == len(prompts) or at - first == most or prompts[at] != prompts[first]:
            yield _Row(drawing, first, at)
            first = at
