"""Estimates the memory of a model, weights and KV cache, from config.json and the sizes of its files."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lmi_server.configuration.engine import EngineMemory
from lmi_server.configuration.model_directory.checkpoint import MAX_HEADER_BYTES
from lmi_server.configuration.model_directory.gguf import is_gguf, read_gguf
from lmi_server.configuration.model_directory.state_estimate import layer_counts, state_bytes
from lmi_server.configuration.options import ModelOptions, ServingOptions
from lmi_server.files.regular_files import open_regular
from lmi_server.machine.inventory import Machine

_BYTES = {"fp32": 4, "float32": 4, "fp16": 2, "float16": 2, "bf16": 2, "bfloat16": 2, "int8": 1, "float8_e4m3fn": 1}
# Bytes per weight for methods that quantise while loading. They leave embeddings and output layer as they are. Other
# methods need a quantised checkpoint, whose files tell the size.
_QUANTISED = {
    "bitsandbytes": 1,
    "bitsandbytes4": 0.5,
    "bitsandbytes8": 1,
    "dynamic_int8": 1,
    "smoothquant": 1,
    "static_int8": 1,
    "fp8": 1,
    "int8": 1,
    "q8_0": 34 / 32,
    "q4_0": 18 / 32,
    "q4_k": 18 / 32,
}
_MAX_WEIGHTS = 1 << 60  # of one file
_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt")


@dataclass(frozen=True, slots=True)
class Estimate:
    """Bytes that one worker takes on each of its `devices`, and the free bytes there; None if unknown.

    - `kv_tokens`: tokens that the running requests can fill: as many as the engine has room for, times the context.
    - `unquantized_bytes`: size of the weights if they were not quantised; None if they are not.
    - `kv_reserved_bytes`: KV cache that the worker allocates when it loads; None if it allocates on demand, or if the
      engine decides.
    - `state_bytes`: what recurrent layers keep of all running requests, which does not grow with their tokens.
    - `image_bytes`: encoded images that a worker keeps at most.
    """

    devices: int
    device_kind: str
    parameters: int | None
    weights_bytes: int | None
    unquantized_bytes: int | None
    kv_bytes_per_token: int | None
    context_length: int | None
    kv_tokens: int | None
    kv_bytes: int | None
    kv_reserved_bytes: int | None
    available_bytes: int | None
    state_bytes: int | None = None
    image_bytes: int | None = None

    @property
    def kv_tokens_that_fit(self) -> int | None:
        """Return the tokens of KV cache that fit beside the weights, however many `kv_tokens` are needed."""
        if self.weights_bytes is None or not self.kv_bytes_per_token or self.available_bytes is None:
            return None
        free = self.available_bytes - self.weights_bytes - (self.state_bytes or 0) - (self.image_bytes or 0)
        return max(0, free) // self.kv_bytes_per_token

    def warnings(self) -> tuple[str, ...]:
        """Return a warning if the weights or one full context do not fit into the free memory."""
        if self.weights_bytes is None or self.available_bytes is None:
            return ()
        place = "main memory" if self.device_kind == "cpu" else "the memory of each device"
        if self.weights_bytes > self.available_bytes:
            return (f"the weights take about {gib(self.weights_bytes)}, {place} has {gib(self.available_bytes)} free",)
        fit = self.kv_tokens_that_fit
        if fit is not None and self.context_length is not None and fit < self.context_length:
            return (f"beside the weights, {place} has room for {fit} tokens of KV cache, less than one full context",)
        return ()


def estimate(
    engine: EngineMemory[ModelOptions], location: str, config: Mapping[str, Any], devices: int, machine: Machine
) -> Estimate:
    """Estimate the memory of the model at `location`, split over `devices`; `config` is its config.json or empty."""
    model = _Model(engine, location, config, machine.device_kind)
    parameters = model.parameters()
    per_token = model.kv_bytes_per_token()
    context = engine.options.context_length() or _int(
        model.text, "max_position_embeddings", "n_positions", "seq_length", "max_seq_len"
    )
    tokens = None if context is None else context * engine.max_running()
    kv_bytes = None if tokens is None or per_token is None else tokens * per_token
    reserved = None
    if machine.device_kind == "cpu" and kv_bytes is not None and context is not None and per_token is not None:
        reserved = engine.reserved_kv_bytes(kv_bytes, context * per_token, machine.available_bytes)
    parts = model.kv_parts(devices)
    return Estimate(
        devices=devices,
        device_kind=machine.device_kind,
        parameters=parameters,
        weights_bytes=_share(model.weights_bytes(parameters), devices),
        unquantized_bytes=_share(model.unquantized_bytes(parameters), devices),
        kv_bytes_per_token=_share(per_token, parts),
        context_length=context,
        kv_tokens=tokens,
        kv_bytes=_share(kv_bytes, parts),
        kv_reserved_bytes=reserved,
        available_bytes=_available(machine),
        state_bytes=_share(model.state_bytes() * engine.max_running() or None, devices),
        image_bytes=engine.image_bytes(config),
    )


def shortages(serving: ServingOptions, machine: Machine, estimated_mb: int = 0) -> Mapping[str, str]:
    """Return a text for each key in full with which `serving` asks for more memory than `machine` has free.

    A reserve counts if it is set, or if the model requires memory beside it. `estimated_mb` is what the model seems to
    require if no key says so. A GPU whose memory is unknown passes.
    """
    free = [gpu.free_bytes for gpu in machine.gpus if gpu.free_bytes is not None]
    demands = (
        _Demand("", serving.required_memory_mb or estimated_mb, serving.reserved_memory_mb, machine.available_bytes),
        _Demand(
            "gpu.",
            serving.gpu_required_memory_mb or estimated_mb,
            serving.gpu_reserved_memory_mb,
            min(free, default=None),
        ),
    )
    given = serving.model_fields_set
    return {
        f"{demand.prefix}{'required' if demand.required else 'reserved'}_memory_mb": demand.text
        for demand in demands
        if demand.is_unmet and (demand.required or f"{demand.prefix.replace('.', '_')}reserved_memory_mb" in given)
    }


class _Demand(NamedTuple):
    """What a model asks for on one kind of device: MiB required, MiB to stay free, and free bytes."""

    prefix: str
    required: int
    reserved: int
    available: int | None

    @property
    def is_unmet(self) -> bool:
        return self.available is not None and self.required + self.reserved > self.available // 2**20

    @property
    def text(self) -> str:
        free = (self.available or 0) // 2**20
        return f"with what stays reserved {self.required + self.reserved} MiB are needed, {free} are free"


def estimate_of_files(directories: Collection[str]) -> int:
    """Return the MiB that a model with these directories seems to need: LMI's estimate, 1.2 times its files."""
    files = {path for directory in directories for path in Path(directory).rglob("*") if path.is_file()}
    return sum(path.stat().st_size for path in files) * 12 // 10 // 2**20


def gib(size: int | None) -> str:
    """Return `size`, in bytes, as "1.00 GiB"; "unknown" for None."""
    return "unknown" if size is None else f"{size / 2**30:.2f} GiB"


def _share(size: int | None, devices: int) -> int | None:
    return None if size is None else -(-size // devices)


def _available(machine: Machine) -> int | None:
    if machine.device_kind == "cpu":
        return machine.available_bytes
    _, devices = machine.accelerator(machine.device_kind)
    free = [device.free_bytes for device in devices if device.free_bytes is not None]
    return min(free) if free and len(free) == len(devices) else None


def _parameters_of_pipeline(directory: Path) -> int:
    """Count the weights of a pipeline of diffusers, whose parts are in directories of their own.

    A part may hold the same weights in half precision, too; these do not count twice.
    """
    files = [path for part in directory.iterdir() if part.is_dir() for path in part.glob("*.safetensors")]
    plain = {path.parent for path in files if ".fp16" not in path.name}
    counted = (path for path in files if ".fp16" not in path.name or path.parent not in plain)
    return sum(_elements(path) for path in counted)


def _size(shape: Sequence[int]) -> int:
    """Return the number of weights of a shape. Raises ValueError where the product is larger than that of any file."""
    size = 1
    for length in shape:
        size *= length
        if not 0 <= size < _MAX_WEIGHTS:
            raise ValueError("the shape is that of no file")
    return int(size)


def _elements(path: Path) -> int:
    """Return the number of weights in a safetensors file, by its header; 0 if it cannot be read."""
    try:
        with open_regular(path) as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(length, MAX_HEADER_BYTES, path.stat().st_size)))
        count = sum(_size(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")
        return count if count < _MAX_WEIGHTS else 0
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return 0


def _size_of_files(location: str) -> int:
    """Return the bytes of the weights in a directory.

    Only the files of one format count, because some checkpoints hold the same weights in two formats.
    """
    if not Path(location).is_absolute():  # a Hugging Face id or an address
        return 0
    sizes = (sum(path.stat().st_size for path in Path(location).glob(pattern)) for pattern in _WEIGHT_FILES)
    return next((size for size in sizes if size), 0)


def inner_size(text: Mapping[str, Any], experts: int) -> int | None:
    """Return the width of an MLP, or of one of `experts`, which may have a width of its own."""
    of_expert = _int(text, "moe_intermediate_size") if experts > 1 else None
    return of_expert or _int(text, "intermediate_size", "n_inner")


class _Model:
    """A model by its config.json, whose sizes are 0 if they are unknown, and by its files."""

    def __init__(
        self, engine: EngineMemory[ModelOptions], location: str, config: Mapping[str, Any], device_kind: str
    ) -> None:
        self.text: Mapping[str, Any] = config.get("text_config") or config
        self._engine = engine
        self._location = location
        self._config = config
        self._in_blocks = is_gguf(location) and engine.options.dtype == "auto" and device_kind == "cpu"
        self._is_quantised = bool(config.get("quantization_config"))
        self._quantize = getattr(engine.options, "quantize", None) or ""
        self._width = self._bytes_per_weight(engine.options.dtype)
        self._layers = _int(self.text, "num_hidden_layers", "n_layer") or 0
        self._hidden = _int(self.text, "hidden_size", "n_embd") or 0
        self._heads = _int(self.text, "num_attention_heads", "n_head") or 0
        self._kv_heads = _int(self.text, "num_key_value_heads", "num_kv_heads") or self._heads
        self._head_size = _int(self.text, "head_dim") or self._hidden // max(1, self._heads)
        self._vocabulary = _int(self.text, "vocab_size") or 0

    def parameters(self) -> int | None:
        return self._parameters_of_files() or self._parameters_of_shape()

    def weights_bytes(self, parameters: int | None) -> int | None:
        if self._in_blocks:
            return read_gguf(Path(self._location)).held
        if self._is_quantised:
            return _size_of_files(self._location) or None
        if parameters is None:
            return None
        width = _QUANTISED.get(self._quantize, self._width)
        in_full = min(parameters, self._embedding_parameters()) if width < self._width else 0
        return int((parameters - in_full) * width + in_full * self._width)

    def unquantized_bytes(self, parameters: int | None) -> int | None:
        """Return the bytes of the weights if they were not quantised; None if they are not."""
        quantised = self._in_blocks or self._is_quantised or self._quantize in _QUANTISED
        return parameters * self._width if quantised and parameters is not None else None

    def kv_bytes_per_token(self) -> int | None:
        if not (self._layers and self._heads and self._hidden):
            return None
        attending = layer_counts(self.text, self._layers).attending
        return 2 * attending * self._kv_heads * self._engine.kv_row_bytes(self._head_size, self._width)

    def state_bytes(self) -> int:
        """Return the bytes that recurrent layers keep of one sequence; 0 if the model has none that are known."""
        return state_bytes(self.text, self._layers, self._width)

    def kv_parts(self, devices: int) -> int:
        """Return among how many devices the KV cache is divided: a head of keys and values is not, but copied."""
        stages = max(1, self._engine.options.pipeline_parallel_degree)
        ranks = max(1, devices // stages)
        return stages * min(ranks, self._kv_heads or ranks)

    def _bytes_per_weight(self, dtype: str) -> int:
        """Return the bytes of one weight; transformers takes a checkpoint as fp32 if config.json has no dtype."""
        parts = (self.text, self._config)
        stored = next((part[key] for part in parts for key in ("dtype", "torch_dtype") if part.get(key)), None)
        return _BYTES.get(str(stored if dtype == "auto" else dtype), 4)

    def _parameters_of_files(self) -> int | None:
        if self._is_quantised:
            return None
        if is_gguf(self._location):
            return read_gguf(Path(self._location)).parameters
        if Path(self._location, "model_index.json").is_file():
            return _parameters_of_pipeline(Path(self._location))
        return _size_of_files(self._location) // self._bytes_per_weight("auto") or None

    def _parameters_of_shape(self) -> int | None:
        """Count the parameters of a decoder by its shape, without biases and norms, which are less than 1 %."""
        if not (self._layers and self._hidden and self._vocabulary and self._heads):
            return None
        attention = 2 * self._hidden * self._head_size * (self._heads + self._kv_heads)
        gated = 3 if _int(self.text, "intermediate_size") else 2
        experts = _int(self.text, "num_local_experts", "num_experts") or 1
        mlp = gated * self._hidden * (inner_size(self.text, experts) or 4 * self._hidden) * experts
        return self._layers * (attention + mlp) + self._embedding_parameters()

    def _embedding_parameters(self) -> int:
        """Count the parameters of the embeddings, and of the output layer if it has its own."""
        # A guess if config.json does not say: GPT-2 and its like, which have no intermediate_size, share one matrix.
        tied = self.text.get("tie_word_embeddings", _int(self.text, "intermediate_size") is None)
        return self._vocabulary * self._hidden * (1 if tied else 2)


def _int(config: Mapping[str, Any], *names: str) -> int | None:
    return next((config[name] for name in names if isinstance(config.get(name), int)), None) or None
