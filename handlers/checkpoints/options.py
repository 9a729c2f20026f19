"""The options that handlers of Hugging Face checkpoints share; importable without transformers."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from lmi_server.configuration.declaration import (
    Allowed,
    Conflict,
    Deprecated,
    DeprecatedValue,
    Documented,
    Key,
    NoEffect,
    ValueMeans,
)
from lmi_server.configuration.engine import EngineDescription, without_keys
from lmi_server.configuration.options import DTYPE_NOTE, Dtype, ModelOptions, ParallelDegree, PositiveInt, lower
from lmi_server.configuration.references import NAMES_NOTHING, NAMES_PATH
from lmi_server.machine.environment import THREAD_VARIABLES

# By the quantisation method in config.json: the extra of lmi-server, and the packages in it that are needed.
QUANTIZATION_PACKAGES = {
    "bitsandbytes": ("bitsandbytes", ("bitsandbytes", "accelerate")),
    "gptq": ("gptq", ("gptqmodel", "optimum")),
    "awq": ("gptq", ("gptqmodel", "accelerate")),
    "compressed-tensors": ("compressed-tensors", ("compressed_tensors",)),
}
# nf4, because fp4, bitsandbytes' default for 4 bits, loses more: on the demo model half a nat of log probability per
# token instead of a quarter.
QUANTIZATION: Mapping[str, Mapping[str, Any]] = {
    "bitsandbytes4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "bitsandbytes8": {"load_in_8bit": True},
    "bitsandbytes": {"load_in_8bit": True},
}

BLOCK_FORMATS = ("q8_0", "q4_0", "q4_k", "int8")
"""Values of option.quantize that hold weights in blocks of few bits, as GGUF does."""

GPU_BLOCK_FORMATS = ("q8_0", "q4_0", "int8")
"""The ones of BLOCK_FORMATS that a GPU holds, too."""

PACKED_METHODS = ("gptq", "awq", "compressed-tensors")
"""Methods in config.json whose packed layers `lmi-server partition` saves as such blocks on the CPU."""

_CODEBOOKS = "the inputs of layers in 4 bits of bitsandbytes are not rounded"

FP8 = "fp8"
"""The value of option.quantize that holds weights in 8-bit floats."""

STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")
"""Values of option.device_map with which accelerate chooses the devices of the layers."""

_DECLARED = "quantization_config"  # in config.json
_DEVICE = re.compile(r"cpu|cuda(:\d+)?")
_PLACE = re.compile(r"cpu|disk|cuda:\d+|\d+")


def _checked_map(value: str) -> str:
    if not value.startswith("{"):
        if value not in STRATEGIES and _DEVICE.fullmatch(value) is None:
            raise ValueError("not a strategy and not a device")
        return value
    places = json.loads(value)
    if not places or not all(_PLACE.fullmatch(str(place)) for place in places.values()):
        raise ValueError("a map of modules to what is no device")
    return value


DeviceMap = Annotated[
    str,
    AfterValidator(_checked_map),
    Allowed(
        f"{', '.join(STRATEGIES)}, cpu, cuda, cuda:N, or a JSON object of modules and devices such as"
        ' {"model.embed_tokens": 0, "model.layers": 1, "model.norm": 1, "lm_head": "cpu"}'
    ),
]


class TransformersOptions(ModelOptions):
    """Keys of serving.properties for a model that transformers loads."""

    tensor_parallel_degree: ParallelDegree = -1
    """GPUs of one worker, over which option.device_map spreads the layers; max means all GPUs of the machine, -1 one.
    """
    device_map: Annotated[
        DeviceMap | None,
        Documented("auto", "it is auto if a worker has several GPUs; one GPU gets the whole model"),
        NAMES_NOTHING,
    ] = None
    """Placement of the layers on the GPUs of a worker, which count from 0, as accelerate defines it; what is on cpu
    beside GPUs, or on disk, is read for each pass."""
    device_id: Annotated[
        int, Field(ge=-1), Allowed("an integer of 0 or more, or -1"), NoEffect("the server sets it")
    ] = -1
    """GPU of the worker."""
    dtype: Annotated[
        Dtype,
        Key(also=("option.data_type",)),
        DTYPE_NOTE,
        ValueMeans("int8", itself="auto", stands_for=("option.quantize", "bitsandbytes8")),
    ] = "auto"
    """Data type of weights and KV cache; auto is the checkpoint's own, and int8 the same as
    option.quantize=bitsandbytes8."""
    low_cpu_mem_usage: Annotated[bool, NoEffect("transformers always loads this way")] = False
    """Load weights one by one instead of twice the model's memory."""
    quantize: Annotated[
        Literal["bitsandbytes", "bitsandbytes4", "bitsandbytes8", "gptq", "awq", "q8_0", "q4_0", "q4_k", "int8", "fp8"]
        | None,
        DeprecatedValue("bitsandbytes", "use bitsandbytes8"),
    ] = None
    """Quantisation of the weights: by bitsandbytes while they load; gptq and awq by the checkpoint. fp8 is for GPUs by
    NVIDIA of compute capability 8.9 or later: 8-bit floats with a scale for each output. With the others kernels
    compute with the weights as they are stored, which are quantised while they load, by q8_0, q4_0 and q4_k in blocks
    as GGUF has them, by int8 with a scale for each output; q4_k is for the CPU."""
    activation_dtype: Annotated[Literal["auto", "int8"], BeforeValidator(lower)] = "auto"
    """Type of the inputs of linear layers whose weights are in blocks of few bits on the CPU, as q8_0 or a GGUF file
    has them: auto is that of the model; int8 rounds them to 8 bits with a scale for each 32, for as many rows as that
    is measured to be faster."""
    load_in_4bit: Annotated[
        bool, Deprecated("use option.quantize=bitsandbytes4", becomes=("option.quantize", "bitsandbytes4"))
    ] = False
    """Quantise the weights to 4 bits."""
    load_in_8bit: Annotated[
        bool, Deprecated("use option.quantize=bitsandbytes8", becomes=("option.quantize", "bitsandbytes8"))
    ] = False
    """Quantise the weights to 8 bits."""
    disable_flash_attn: Annotated[
        bool, NoEffect("attention runs on torch's kernels, which take flash attention where they can")
    ] = True
    """Do not use the flash attention of transformers."""
    save_mp_checkpoint_path: Annotated[str | None, NAMES_PATH] = None
    """Directory to write quantised weights to while the model loads."""
    threads: PositiveInt | None = None
    """Threads that a worker uses inside an operation on the CPU. By default the workers of the model (maxWorkers)
    divide the cores that the server may use."""

    def keeps_blocks(self, path: str) -> bool:
        """Whether weights of the model at a path stay in blocks of few bits on the CPU, or are quantised to such."""
        return self.quantize in BLOCK_FORMATS or (path.endswith(".gguf") and self.dtype == "auto")

    def checkpoint_problem(self, config: Mapping[str, Any]) -> tuple[str, str] | None:
        """Return a key in full whose value does not fit a checkpoint with this config.json, and why; None if all fit.

        `lmi-server check` and the load both ask, for config.json may be on another machine when the first one does.
        """
        declared = _declared_quantization(config)
        # The load of such a checkpoint reads no declaration of text_config.
        if config.get(_DECLARED) is None and self.quantize in ("gptq", "awq"):
            reason = f"config.json has no {_DECLARED}; name a checkpoint in {self.quantize} in option.model_id"
            return "option.quantize", f"{reason}, or set option.quantize=q8_0 or q4_0"
        problem = self._unrounded(declared, config) if self.activation_dtype == "int8" else None
        return None if problem is None else ("option.activation_dtype", problem)

    @property
    def is_on_cpu(self) -> bool:
        """Whether option.device_map leaves the whole model on the CPU, whatever GPUs there are."""
        return self.device_map not in (None, *STRATEGIES) and not self.mapped_gpus

    def device_problem(self, on_gpus: bool) -> tuple[str, str] | None:
        """Return a key in full whose value does not fit a worker with or without GPUs, and why; None if all fit."""
        on_gpus = on_gpus and not self.is_on_cpu
        if on_gpus and isinstance(self.placement, Mapping):  # it may leave some modules on the CPU
            return None
        problem = self.block_problem(on_gpus, self.dtype)
        if problem is not None:
            return "option.quantize", problem
        if not on_gpus or self.activation_dtype != "int8":
            return None
        reason = "layers round their activations on the CPU alone, and the model goes on a GPU"
        return "option.activation_dtype", f"{reason}; remove the key, or set load_on_devices=cpu"

    def block_problem(self, on_gpu: bool, dtype: str) -> str | None:
        """Return why weights of a model in `dtype` do not become blocks of option.quantize; None if they may."""
        if self.quantize not in BLOCK_FORMATS:
            return None
        if on_gpu and (self.quantize not in GPU_BLOCK_FORMATS or self.save_mp_checkpoint_path is not None):
            return (
                f"on a GPU weights are quantised to {', '.join(GPU_BLOCK_FORMATS)}, and are not saved; set one of these"
                " without option.save_mp_checkpoint_path, or bitsandbytes4"
            )
        if not on_gpu and dtype not in ("auto", "bf16", "fp32"):
            return (
                f"on a CPU it is for models in bf16 or fp32, and this one is in {dtype} (option.dtype={self.dtype});"
                " set option.dtype=bf16 or fp32"
            )
        return None

    def _unrounded(self, declared: Any, config: Mapping[str, Any]) -> str | None:
        """Return why no layer of the checkpoint would round its activations; None if some do, or perhaps do."""
        remedy = f"remove the key, or on a CPU set option.quantize to one of {', '.join(BLOCK_FORMATS)}"
        if declared is not None:
            is_4_bits = isinstance(declared, Mapping) and declared.get("load_in_4bit") is True
            return f"{_CODEBOOKS}; remove the key" if is_4_bits else None
        if self.quantize == "bitsandbytes4":
            return f"{_CODEBOOKS}; {remedy}"
        if self.quantize in QUANTIZATION:
            dtype = config.get("dtype") or config.get("torch_dtype") if self.dtype == "auto" else self.dtype
            if dtype not in ("fp16", "fp32", "float32"):  # a checkpoint in float16 is loaded as bfloat16 on a CPU
                return None
            return f"with {self.quantize} it is for models in bf16; set option.dtype=bf16, {remedy}"
        return None if self.quantize in BLOCK_FORMATS else f"it is for weights in blocks; {remedy}"

    @property
    def placement(self) -> str | Mapping[str, str | int] | None:
        """Return option.device_map as transformers takes it."""
        if self.device_map is not None and self.device_map.startswith("{"):
            return json.loads(self.device_map)  # type: ignore[no-any-return]
        return self.device_map

    @property
    def mapped_gpus(self) -> frozenset[int]:
        """Return the GPUs of the worker that option.device_map names."""
        places = self.placement.values() if isinstance(self.placement, Mapping) else [self.placement]
        numbers = (re.fullmatch(r"(?:cuda:?)?(\d*)", str(place)) for place in places)
        return frozenset(int(number[1] or 0) for number in numbers if number is not None)

    def conflicts(self, given: Collection[str]) -> Iterator[Conflict]:
        if self.dtype == "int8":
            yield Conflict(("option.dtype", "option.quantize"), "int8 only without option.quantize")
        gpus = self.devices_per_worker
        if gpus is not None and self.ranks is None and max(self.mapped_gpus, default=0) >= gpus:
            yield Conflict(
                ("option.device_map",), f"GPUs 0 to {gpus - 1}, because option.tensor_parallel_degree gives {gpus}"
            )

        if self.quantize == FP8 and self.save_mp_checkpoint_path is not None:
            reason = f"no path with {self.quantize}, which quantises whenever the model loads"
            yield Conflict(("option.save_mp_checkpoint_path", "option.quantize"), reason)

        offloaded = {"disk", "cpu"} if self.mapped_gpus else {"disk"}
        if self.quantization_config() is not None and isinstance(self.placement, Mapping):
            stored = offloaded.intersection(map(str, self.placement.values()))
            if stored:
                yield Conflict(
                    ("option.device_map", "option.quantize"),
                    f"a map without {' and '.join(sorted(stored))}, because bitsandbytes computes where weights are",
                )

    def engine_arguments(self) -> Mapping[str, Any]:
        """Return the arguments of transformers' `from_pretrained` beside the model that differ from its defaults."""
        decided = {
            "dtype": self.dtype,
            "revision": self.revision,
            "trust_remote_code": self.trust_remote_code,
            "device_map": self.placement,
            "quantization_config": self.quantization_config(),
        }
        return {name: value for name, value in decided.items() if value}

    def quantization_config(self) -> Mapping[str, Any] | None:
        """Return the settings with which bitsandbytes quantises while weights load; None if it does not.

        A checkpoint that is quantised already brings its own settings.
        """
        return QUANTIZATION.get(self.quantize or "")


def _declared_quantization(config: Mapping[str, Any]) -> Any:
    """Return the quantization_config of a config.json or of its text_config; None if there is none."""
    parts = (config, config.get("text_config"))
    declared = (part.get(_DECLARED) for part in parts if isinstance(part, Mapping))
    return next((each for each in declared if each is not None), None)


class TransformersEngine(EngineDescription[TransformersOptions]):
    """transformers."""

    variables = THREAD_VARIABLES

    def division(self, gpus: int) -> str | None:
        device_map = self.options.device_map
        one_device = device_map is not None and _DEVICE.fullmatch(device_map) is not None
        if self.options.ranks is not None or gpus < 2 or one_device:
            return super().division(gpus)
        return (
            f"accelerate places whole layers on the {gpus} GPUs of a worker (device_map={device_map or 'auto'}),"
            " which compute one after the other; the KV cache of a layer is on its GPU"
        )

    def checkpoint_problem(self, location: Path, config: Mapping[str, Any], on_gpus: bool) -> tuple[str, str] | None:
        found = self.options.device_problem(on_gpus)
        return found or (self.options.checkpoint_problem(config) if config and location.is_dir() else None)

    def partition(self, config: Mapping[str, Any]) -> Mapping[str, str | None] | str:
        declared = config.get("quantization_config")
        method = declared.get("quant_method") if isinstance(declared, Mapping) else None
        quantizes = self.options.quantization_config() is not None or self.options.quantize in BLOCK_FORMATS
        if method not in PACKED_METHODS and not quantizes:
            if method is not None:
                return f"the checkpoint is quantised with {method} already; serve it as it is"
            return (
                "set option.quantize=bitsandbytes4 or bitsandbytes8, or on CPUs one of"
                f" {', '.join(BLOCK_FORMATS)}; weights as they are need no preparation"
            )
        quantization = ("quantize", "load_in_4bit", "load_in_8bit")
        return without_keys("model_id", "revision", "save_mp_checkpoint_path", *quantization)
