"""The options of stable diffusion on AWS Inferentia and Trainium; importable without optimum-neuron."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from handlers.stable_diffusion.options import (
    IMAGE_TO_IMAGE,
    INPAINTING,
    TEXT_TO_IMAGE,
    WITHOUT_TEXT,
    StableDiffusionOptions,
)
from lmi_server.configuration.declaration import Allowed, Conflict, Documented, Key, NoEffect, Unavailable
from lmi_server.configuration.engine import EngineDescription, without_keys
from lmi_server.configuration.options import LONG_DTYPES, ParallelDegree, PositiveInt, lower, short_dtype
from lmi_server.configuration.tasks import Workload
from lmi_server.machine.inventory import Machine

_LMI_HAS_NONE = "LMI has no default, and fails without the key"


def makes_images(workload: Workload) -> bool:
    """Return whether a model of LMI's handler for Neuron is a pipeline of images."""
    images = (TEXT_TO_IMAGE, IMAGE_TO_IMAGE, INPAINTING)
    return workload.use_stable_diffusion or workload.task in images


class NeuronImageOptions(StableDiffusionOptions):
    """Keys of serving.properties for a pipeline of diffusers that Neuron's compiler compiles for fixed shapes."""

    use_stable_diffusion: bool = True
    """The model is a pipeline of diffusers; LMI's sign for it."""
    tensor_parallel_degree: ParallelDegree = 2
    """Neuron cores of one worker; optimum-neuron loads the denoiser on two."""
    dtype: Annotated[
        Literal["fp32", "bf16"],
        BeforeValidator(lambda value: {"f32": "fp32"}.get(value, short_dtype(value))),
        Allowed("fp32 (float32), bf16 (bfloat16)"),
        Key(also=("option.data_type", "option.amp")),
        Documented(None, _LMI_HAS_NONE),
    ] = "bf16"
    """Data type of weights and matrix products."""
    height: PositiveInt = 512
    """Height of images in pixels; compiled into the graphs."""
    width: PositiveInt = 512
    """Width of images in pixels; compiled into the graphs."""
    num_images_per_prompt: PositiveInt = 1
    """Images that one prompt makes in a run; compiled into the graphs."""
    compiled_batch_size: PositiveInt = 1
    """Prompts of one run, in place of LMI's batch_size; compiled into the graphs."""
    task: Annotated[Literal["auto", "text-to-image", "image-to-image", "inpainting"], BeforeValidator(lower)] = "auto"
    """What requests may ask for; compiled into the graphs. auto: what the class of the model says."""
    neuron_optimize_level: Literal["1", "2", "3"] | None = None
    """Optimisation level of the compiler; without it 2."""
    quantize: Annotated[
        Literal["bitsandbytes4", "bitsandbytes8"] | None,
        Unavailable(lambda method: method is not None, "remove it: optimum-neuron quantises no pipelines"),
    ] = None
    """Quantisation of the weights."""
    max_image_pixels: Annotated[PositiveInt, NoEffect("images have the size that the model was compiled for")] = 4194304
    """Width times height that an image may have."""
    threads: Annotated[PositiveInt | None, NoEffect("the model computes on Neuron cores")] = None
    """Threads that a worker uses inside an operation on the CPU."""

    def engine_arguments(self) -> Mapping[str, Any]:
        """Return the arguments of optimum-neuron's `from_pretrained(export=True)` for its pipelines."""
        cast = {"auto_cast": "matmul", "auto_cast_type": "bf16"} if self.dtype == "bf16" else {"auto_cast": None}
        return {
            "torch_dtype": LONG_DTYPES[self.dtype],
            "batch_size": self.compiled_batch_size,
            "height": self.height,
            "width": self.width,
            "num_images_per_prompt": self.num_images_per_prompt,
            "optlevel": self.neuron_optimize_level or "2",
            "trust_remote_code": self.trust_remote_code,
            **cast,
        }

    def conflicts(self, given: Collection[str]) -> Iterator[Conflict]:
        yield from super().conflicts(given)
        if self.tensor_parallel_degree in (-1, 0, 1):
            yield Conflict(("option.tensor_parallel_degree",), "2 or more: the denoiser is loaded on two Neuron cores")


class NeuronImageEngine(EngineDescription[NeuronImageOptions]):
    """optimum-neuron, which compiles a pipeline for fixed shapes."""

    def without_effect(self, machine: Machine) -> Iterator[tuple[str, Collection[str]]]:
        yield WITHOUT_TEXT

    def partition(self, config: Mapping[str, Any]) -> Mapping[str, str | None] | str:
        return without_keys("model_id", "revision", "save_mp_checkpoint_path")
