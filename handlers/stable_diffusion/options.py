"""The options of the stable_diffusion handler; importable without diffusers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from handlers.checkpoints.options import QUANTIZATION
from lmi_server.configuration.declaration import Conflict, Documented, Key, NoEffect, Unavailable
from lmi_server.configuration.engine import EngineDescription, without_keys
from lmi_server.configuration.options import (
    LONG_DTYPES,
    FloatDtype,
    ModelOptions,
    ParallelDegree,
    PositiveInt,
    lower,
)
from lmi_server.configuration.references import NAMES_NOTHING, NAMES_PATH
from lmi_server.machine.environment import THREAD_VARIABLES
from lmi_server.machine.inventory import Machine

TEXT_TO_IMAGE = "text-to-image"
IMAGE_TO_IMAGE = "image-to-image"
INPAINTING = "inpainting"

_ONE_PROCESS = "one process computes with all GPUs of a worker"
WITHOUT_TEXT = (
    "a model that generates text",
    ("output_formatter", "input_formatter", "tgi_compat", "async_mode", "max_rolling_batch_size", "enable_streaming"),
)
"""What a pipeline of images lacks, and the keys that have no effect without it."""


class StableDiffusionOptions(ModelOptions):
    """Keys of serving.properties for a pipeline of diffusers, which makes images."""

    task: Annotated[
        Literal["auto", "text-to-image", "image-to-image", "inpainting"],
        BeforeValidator(lower),
    ] = "auto"
    """What requests may ask for; auto: whatever the weights of the pipeline can do. A request with an image asks for
    image-to-image, one with a mask, too, for inpainting."""
    tensor_parallel_degree: ParallelDegree = 1
    """GPUs of one worker, over which accelerate spreads the parts of the pipeline; max means all GPUs of the machine.
    """
    mpi_mode: Annotated[bool, NoEffect(_ONE_PROCESS)] = False
    """LMI starts one process per GPU, which share the layers of the model."""
    rolling_batch: Annotated[Literal["disable", "auto"], BeforeValidator(lower)] = "disable"
    """Iteration-level batching does not apply to images: requests run together as one dynamic batch (batch_size)."""
    dtype: Annotated[
        FloatDtype,
        Key(also=("option.data_type",)),
        Documented("fp16", "fp16 is slow on the CPU, which gets fp32"),
    ] = "auto"
    """Data type of the weights; auto is fp16 on a GPU and fp32 on the CPU."""
    height: PositiveInt | None = None
    """Pixels of an image if the request does not say; without it the pipeline's own."""
    width: PositiveInt | None = None
    """Pixels of an image if the request does not say; without it the pipeline's own."""
    num_images_per_prompt: PositiveInt = 1
    """Images for a prompt if the request does not say."""
    max_images: PositiveInt = 10
    """Images that one request may ask for."""
    max_image_pixels: PositiveInt = 4194304
    """Width times height that an image may have; a request for more is refused with 400."""
    max_inference_steps: PositiveInt = 250
    """Denoising steps that a request may ask for."""
    quantize: Literal["bitsandbytes4", "bitsandbytes8"] | None = None
    """Quantisation of the denoiser and the text encoders, while they load."""
    enable_cuda_graph: Annotated[
        bool, Unavailable.values(True, instead="leave it out: diffusers captures no CUDA graphs")
    ] = False
    """Capture the forward pass as a CUDA graph."""
    save_mp_checkpoint_path: Annotated[str | None, NAMES_PATH] = None
    """Directory to write the pipeline to, quantised as it is served, while it loads."""
    use_auth_token: Annotated[
        str | None, NoEffect("the server fetches the model, with the token in HF_TOKEN"), NAMES_NOTHING
    ] = None
    """Token for the Hugging Face Hub."""
    low_cpu_mem_usage: Annotated[bool, NoEffect("diffusers always loads this way")] = False
    """Load weights one by one instead of twice the model's memory."""
    threads: PositiveInt | None = None
    """Threads that a worker uses inside an operation on the CPU. By default the workers of the model (maxWorkers)
    divide the cores that the server may use."""

    @property
    def ranks(self) -> int | None:
        return None

    def engine_arguments(self) -> Mapping[str, Any]:
        """Return the arguments of `DiffusionPipeline.from_pretrained` that do not depend on the machine."""
        decided = {
            "dtype": LONG_DTYPES.get(self.dtype),
            "revision": self.revision,
            "trust_remote_code": self.trust_remote_code,
            "quantization_config": self.quantization_config(),
        }
        return {"use_safetensors": True, **{name: value for name, value in decided.items() if value}}

    def quantization_config(self) -> Mapping[str, Any] | None:
        """Return the settings with which bitsandbytes quantises while weights load; None if it does not."""
        return QUANTIZATION.get(self.quantize or "")

    def conflicts(self, given: Collection[str]) -> Iterator[Conflict]:
        if self.width and self.height and self.width * self.height > self.max_image_pixels:
            yield Conflict(
                ("option.width", "option.height", "option.max_image_pixels"),
                f"at most {self.max_image_pixels} pixels together, which option.max_image_pixels allows",
            )
        if self.num_images_per_prompt > self.max_images:
            yield Conflict(
                ("option.num_images_per_prompt", "option.max_images"),
                f"at most {self.max_images}, which option.max_images allows",
            )


class StableDiffusionEngine(EngineDescription[StableDiffusionOptions]):
    """diffusers."""

    variables = THREAD_VARIABLES

    @classmethod
    def recommend(cls, machine: Machine) -> Mapping[str, str]:
        return {"option.dtype": "fp16" if machine.gpus else "fp32"}

    @property
    def device(self) -> str:
        return self.spec.device if self.options.quantize is None else "gpu"

    def without_effect(self, machine: Machine) -> Iterator[tuple[str, Collection[str]]]:
        yield WITHOUT_TEXT

    def division(self, gpus: int) -> str | None:
        if gpus < 2:
            return None
        return f"accelerate places whole parts of the pipeline on the {gpus} GPUs of a worker (device_map=balanced)"

    def partition(self, config: Mapping[str, Any]) -> Mapping[str, str | None] | str:
        if self.options.quantize is None:
            return "set option.quantize=bitsandbytes4 or bitsandbytes8; weights as they are need no preparation"
        return without_keys("model_id", "revision", "quantize", "save_mp_checkpoint_path")
