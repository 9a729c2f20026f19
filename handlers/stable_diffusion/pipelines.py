"""Loads a pipeline of diffusers and runs it. The only module here that imports torch and diffusers."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers

from handlers.checkpoints.saving import saving
from handlers.stable_diffusion.classes import (
    CLASS_ENDINGS,
    OnStep,
    defaults_of,
    read_index,
    stem_of,
    step_callback,
)
from handlers.stable_diffusion.options import IMAGE_TO_IMAGE, INPAINTING, StableDiffusionOptions
from handlers.stable_diffusion.requests import Drawing, Mode
from lmi_server.contract.errors import (
    ModelLoadError,
    ModelMemoryError,
    RequestError,
    describe,
    first_line,
    is_out_of_memory,
)

_DENOISERS = ("unet", "transformer", "prior", "decoder")
_QUANTIZED = ("unet", "transformer", "text_encoder", "text_encoder_2", "text_encoder_3")
_MIB = 2**20


class Pipelines:
    """One pipeline with its weights, in each of the forms that its tasks need."""

    size = None  # any

    def __init__(self, model_dir: str, options: StableDiffusionOptions) -> None:
        """Load the pipeline in a directory. Raises ModelLoadError."""
        diffusers.utils.logging.disable_progress_bar()
        transformers.utils.logging.disable_progress_bar()
        if options.threads:
            torch.set_num_threads(options.threads)
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self.dtype = _dtype(options.dtype, self._device)
        self._base = _load(model_dir, options, self._device, self.dtype)
        self._by_task = dict(_forms(self._base, options.task))
        if not self._by_task:
            raise ModelLoadError(
                f"{type(self._base).__name__} makes no images by option.task={options.task}; remove the key, or name a"
                " pipeline that does"
            )
        for pipeline in self._by_task.values():
            pipeline.set_progress_bar_config(disable=True)
        self._adapters: dict[str, str] = {}
        self._added = 0
        if options.save_mp_checkpoint_path is not None:
            with saving(options.save_mp_checkpoint_path):
                self._base.save_pretrained(options.save_mp_checkpoint_path)

    @property
    def modes(self) -> Mapping[str, Mode]:
        """Return what the pipeline can do, by task."""
        return {task: Mode(type(one).__name__, defaults_of(one.__call__)) for task, one in self._by_task.items()}

    @property
    def multiple(self) -> int:
        """Return the number of pixels by which width and height must be divisible."""
        patches = 2 if getattr(self._base, "transformer", None) is not None else 1
        return int(getattr(self._base, "vae_scale_factor", 8)) * patches

    @property
    def details(self) -> Mapping[str, Any]:
        """Return facts of the pipeline for the log and `explain`."""
        modules = [part for part in self._base.components.values() if isinstance(part, torch.nn.Module)]
        return {
            "pipeline": type(self._base).__name__,
            "tasks": ", ".join(self._by_task),
            "dtype": str(self.dtype).removeprefix("torch."),
            "device": self._device,
            "threads": torch.get_num_threads(),
            "parameters": sum(weight.numel() for module in modules for weight in module.parameters()),
            "weights_mib": round(sum(_bytes(module) for module in modules) / _MIB, 1),
        }

    def draw(self, drawings: Sequence[Drawing], on_step: OnStep) -> list[list[Any]]:
        """Return the images of each drawing; they are of one group and run together.

        Raises ValueError if the pipeline cannot draw one of them, and whatever `on_step` raises.
        """
        first = drawings[0]
        pipeline = self._by_task[first.task]
        self._choose_adapter(first.adapter)
        with torch.inference_mode():
            images = pipeline(**self._arguments(pipeline, drawings, on_step)).images
        rest = iter(images)
        return [[next(rest) for _ in drawing.seeds] for drawing in drawings]

    def _arguments(self, pipeline: Any, drawings: Sequence[Drawing], on_step: OnStep) -> dict[str, Any]:
        first = drawings[0]
        known = defaults_of(pipeline.__call__)
        arguments: dict[str, Any] = {**first.arguments, "output_type": "pil"}
        for name in first.texts:
            arguments[name] = [text for drawing in drawings for text in drawing.texts[name]]
        # On the CPU, so that a seed means the same image on every device.
        arguments["generator"] = [torch.Generator().manual_seed(seed) for drawing in drawings for seed in drawing.seeds]
        for name, field in (("image", "image"), ("mask_image", "mask")):
            if getattr(first, field) is not None:
                arguments[name] = [getattr(drawing, field) for drawing in drawings for _ in drawing.seeds]
        if first.size is not None and {"width", "height"} <= known.keys():
            arguments["width"], arguments["height"] = first.size
        if "callback_on_step_end" in known:
            arguments["callback_on_step_end"] = step_callback(on_step)
        return arguments

    # --- adapters ---

    def add_adapter(self, name: str, directory: str) -> None:
        """Load a LoRA adapter, or replace the one of that name. Raises RequestError; nothing has changed then."""
        if not hasattr(self._base, "load_lora_weights"):
            raise RequestError(f"{type(self._base).__name__} takes no LoRA adapters")
        self._added += 1
        loaded = f"adapter_{self._added}"  # peft makes a module of this name, which has no dots
        try:
            self._base.load_lora_weights(directory, adapter_name=loaded, use_safetensors=True, local_files_only=True)
        except Exception as error:  # the border to diffusers and peft: files of any kind fail in many ways
            self._delete(loaded)
            raise RequestError(f"adapter {name} cannot be used: {describe(error)}") from error
        if not self._holds(loaded):
            raise RequestError(f"adapter {name} cannot be used: it has no weights for {type(self._base).__name__}")
        replaced = self._adapters.get(name)
        self._adapters[name] = loaded
        if replaced is not None:
            self._delete(replaced)

    def remove_adapter(self, name: str) -> None:
        """Remove an adapter; nothing happens if there is none of that name."""
        loaded = self._adapters.pop(name, None)
        if loaded is not None:
            self._delete(loaded)

    def _choose_adapter(self, name: str | None) -> None:
        if name is not None:
            self._base.enable_lora()
            self._base.set_adapters([self._adapters[name]])
        elif self._adapters:
            self._base.disable_lora()

    def _holds(self, loaded: str) -> bool:
        return any(loaded in names for names in self._base.get_list_adapters().values())

    def _delete(self, loaded: str) -> None:
        if self._holds(loaded):
            self._base.delete_adapters(loaded)


def _dtype(name: str, device: str) -> torch.dtype:
    known = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    return known.get(name, torch.float32 if device == "cpu" else torch.float16)


def _load(model_dir: str, options: StableDiffusionOptions, device: str, dtype: torch.dtype) -> Any:
    index = read_index(model_dir)
    spread = device == "cuda" and torch.cuda.device_count() > 1
    more: dict[str, Any] = {"device_map": "balanced"} if spread else {}
    more |= _left_out(index)
    variant = _variant(Path(model_dir))
    if variant is not None:
        more["variant"] = variant
    quantization = _quantization(index, options, dtype)
    if quantization is not None:
        more["quantization_config"] = quantization
    with _enough_memory(model_dir, device):
        # Pickled weights can run code when they load: only safetensors are read.
        pipeline: Any = diffusers.DiffusionPipeline.from_pretrained(
            model_dir,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=options.trust_remote_code,
            local_files_only=True,
            **more,
        )
        return pipeline if spread else pipeline.to(device)


@contextmanager
def _enough_memory(model_dir: str, device: str) -> Iterator[None]:
    """Turn a lack of memory into a ModelMemoryError with the keys that help on this device."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        quantized = "option.quantize=bitsandbytes4, raise option.tensor_parallel_degree"
        keys = "option.dtype=bf16" if device == "cpu" else quantized
        raise ModelMemoryError(
            f"{model_dir} does not fit into memory ({first_line(error)}); set {keys}, or use a machine with more memory"
        ) from error


def _variant(model_dir: Path) -> str | None:
    """Return "fp16" if the denoiser has weights of that variant alone."""
    for name in _DENOISERS:
        files = [path.name for path in (model_dir / name).glob("*.safetensors")]
        if files and all(".fp16" in file for file in files):
            return "fp16"
    return None


def _left_out(index: Mapping[str, Any]) -> Mapping[str, None]:
    """Return None for each text encoder that the class takes and the model lacks: SD3 does without its largest one."""
    kind = getattr(diffusers, str(index.get("_class_name")), None)
    names = () if kind is None else inspect.signature(kind).parameters
    return {
        name: None
        for name in names
        if name.startswith(("text_encoder", "tokenizer")) and index.get(name) in (None, [None, None])
    }


def _quantization(index: Mapping[str, Any], options: StableDiffusionOptions, dtype: torch.dtype) -> Any:
    settings = options.quantization_config()
    if settings is None:
        return None
    if not torch.cuda.is_available():
        raise ModelLoadError(f"option.quantize={options.quantize}: diffusers quantises on a GPU only; remove the key")
    if "load_in_4bit" in settings:
        settings = {**settings, "bnb_4bit_compute_dtype": dtype}
    libraries = {"diffusers": diffusers.BitsAndBytesConfig, "transformers": transformers.BitsAndBytesConfig}
    mapping = {
        name: libraries[index[name][0]](**settings)
        for name in _QUANTIZED
        if isinstance(index.get(name), list) and index[name][0] in libraries
    }
    return diffusers.PipelineQuantizationConfig(quant_mapping=mapping)


def _forms(base: Any, wanted: str) -> Iterator[tuple[str, Any]]:
    """Yield each task that the weights of `base` can do, with the pipeline for it."""
    for task in CLASS_ENDINGS:
        if wanted in ("auto", task) and _can(base, task):
            kind = _class_for(base, task)
            if kind is not None:
                yield task, _of_class(kind, base)


def _of_class(kind: Any, base: Any) -> Any:
    """Return a pipeline of another class with the parts of `base`, as they are; diffusers' own way converts them."""
    given = {**base.config, **base.components}
    return kind(**{name: given[name] for name in inspect.signature(kind).parameters if name in given})


def _class_for(base: Any, task: str) -> Any:
    """Return diffusers' class for a task with the weights of `base`; None if there is none.

    The classes for one kind of weights differ in the end of their names. diffusers has a table of them, but reading it
    imports every pipeline that there is.
    """
    stem = stem_of(type(base).__name__)
    names = (f"{stem}{ending}" for ending in CLASS_ENDINGS[task])
    found = next((kind for name in names if (kind := getattr(diffusers, name, None)) is not None), None)
    edits = task == IMAGE_TO_IMAGE and "image" in defaults_of(
        base.__call__
    )  # one class for texts and images, such as Flux Kontext
    return type(base) if found is None and edits else found


def _can(base: Any, task: str) -> bool:
    """Return whether the denoiser takes what the task gives it: one that was trained to inpaint also takes a mask."""
    channels = getattr(getattr(base, "unet", None), "config", {}).get("in_channels", 4)
    return task == INPAINTING if channels == 9 else True


def _bytes(module: torch.nn.Module) -> int:
    return sum(weight.numel() * weight.element_size() for weight in module.parameters())
