"""Loads the tokenizer, configuration and model of a Hugging Face checkpoint with transformers, as the options say."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoTokenizer
from transformers.utils.logging import set_tqdm_hook

from handlers.checkpoints.blocks.gguf_weights import keep_stored
from handlers.checkpoints.blocks.int8_activations import round_activations
from handlers.checkpoints.blocks.layers import KeptLayer
from handlers.checkpoints.blocks.packed_checkpoints import as_packed_layers, packed_to_save
from handlers.checkpoints.blocks.packed_layers import keep_packed
from handlers.checkpoints.blocks.quantizing import quantize_to_blocks
from handlers.checkpoints.blocks.saved_blocks import BLOCKS, save_blocks
from handlers.checkpoints.fp8.layers import quantize_to_fp8
from handlers.checkpoints.gguf import (
    gguf_arguments,
    gguf_weights,
    is_gguf,
    load_gguf_tokenizer,
    refuse_damaged,
    refuse_other_shapes,
    refuse_sizes,
)
from handlers.checkpoints.gpus import NO_GPUS, TorchGpus, free_memory, lack_bf16, usable_gpus
from handlers.checkpoints.grouped.layers import has_gpu_kernels
from handlers.checkpoints.options import (
    BLOCK_FORMATS,
    FP8,
    PACKED_METHODS,
    STRATEGIES,
    TransformersOptions,
)
from handlers.checkpoints.placement import is_spread, main_device, memory_limits, refuse_divided_layers
from handlers.checkpoints.quantization import (
    check_quantization,
    checkpoint_method,
    keep_activations,
    leave_uncompiled,
    quantization_arguments,
    quantization_details,
    refuse_gpu_layouts,
    refuse_malformed_declaration,
    refuse_odd_widths,
    warn_once_of_casts,
)
from handlers.checkpoints.saving import saving
from lmi_server.configuration.options import LONG_DTYPES, short_dtype
from lmi_server.contract.errors import ModelLoadError, ModelMemoryError, first_line, is_out_of_memory
from lmi_server.contract.texts.quoting import excerpt
from lmi_server.machine.environment import own_rank
from lmi_server.machine.memory import free_and_total
from lmi_server.processes import load_progress

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_WEIGHTS = "Loading weights"  # what transformers writes beside its bar

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")

_BLOCK_DTYPES = ("auto", torch.bfloat16, torch.float32)  # of activations with weights in blocks; auto is never fp16

_BROKEN = (
    StrictDataclassError, ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError,
)  # fmt: skip

_BEFORE_BF16 = "a GPU of this worker is older than compute capability 8.0, and computes no bfloat16"


def load_tokenizer(path: str, options: TransformersOptions) -> Any:
    """Return the checkpoint's tokenizer. Raises ModelLoadError."""
    if is_gguf(path):
        return load_gguf_tokenizer(path, lambda **arguments: from_pretrained(AutoTokenizer, **arguments))
    return from_pretrained(AutoTokenizer, path, **_origin(options))


def load_config(path: str, options: TransformersOptions) -> Any:
    """Return the checkpoint's configuration. Raises ModelLoadError."""
    if is_gguf(path):
        refuse_damaged(path)
        return from_pretrained(AutoConfig, **gguf_arguments(path))
    refuse_malformed_declaration(Path(path))
    return from_pretrained(AutoConfig, path, **_origin(options))


def load_model(auto_class: Any, path: str, options: TransformersOptions, **more: Any) -> Any:
    """Load a model for inference; `more` are further arguments of `from_pretrained`. Raises ModelLoadError."""
    arguments = {"path": path, **model_arguments(path, options, **more)}
    model = from_pretrained(auto_class, **arguments)
    if is_gguf(path):
        refuse_other_shapes(model, path)
    refuse_divided_layers(model, arguments.get("device_map"))
    return prepare(model, path, options)


def prepare(model: Any, path: str, options: TransformersOptions) -> Any:
    """Return a model that transformers has loaded, for inference: its weights are held, and saved, as the options say.

    Raises ModelLoadError.
    """
    model.requires_grad_(False)
    refuse_odd_widths(model)
    if options.save_mp_checkpoint_path is None or not _save(model, options):
        keep_packed(model)
    keep_activations(model)
    leave_uncompiled(model)
    warn_once_of_casts()
    details = _keep_blocks(model, path, options) or quantization_details(model)
    if options.activation_dtype == "int8" and own_rank().size == 1:
        round_activations(model)
    if details:
        logger.info(
            "weights quantised with %s take %s MiB; unquantised they would take %s MiB",
            *(details[name] for name in ("quantization", "weights_mib", "unquantized_weights_mib")),
        )
    return model.eval()


def _keep_blocks(model: Any, path: str, options: TransformersOptions) -> dict[str, Any]:
    """Hold weights in few bits, if options or file say so; return details, none if it has no such weights."""
    if options.quantize in BLOCK_FORMATS:
        return quantize_blocks(model, options) if own_rank().size == 1 else {}  # ranks do when they have their parts
    if options.quantize == FP8:
        return quantize_to_fp8(model)
    is_whole = main_device(model).type == "cpu" and own_rank().size == 1
    return keep_stored(model, path) if is_whole and options.keeps_blocks(path) else {}


def quantize_blocks(model: Any, options: TransformersOptions) -> dict[str, Any]:
    """Quantise a model in place as one of BLOCK_FORMATS; return details for the log. Raises ModelLoadError."""
    assert options.quantize is not None
    on_gpu = main_device(model).type != "cpu"
    if on_gpu and (is_spread(model) or not has_gpu_kernels()):
        raise ModelLoadError(
            f"option.quantize={options.quantize} is for the CPU, and for one GPU by NVIDIA where Triton is installed;"
            " set option.quantize=bitsandbytes8 or bitsandbytes4"
        )
    problem = options.block_problem(on_gpu, short_dtype(str(model.dtype).removeprefix("torch.")))
    _refuse(options, None if problem is None else ("option.quantize", problem))
    directory = options.save_mp_checkpoint_path
    kept: dict[str, KeptLayer] | None = None if directory is None else {}
    details = quantize_to_blocks(model, options.quantize, kept, on_gpu)
    if directory is not None and kept is not None:
        _save_blocks(model, kept, directory)
    return details


def _save(model: Any, options: TransformersOptions) -> bool:
    """Write the weights to option.save_mp_checkpoint_path; return whether packed layers have become blocks for that.

    Layers that are to be quantised to blocks are saved when they are. Raises ModelLoadError.
    """
    directory = options.save_mp_checkpoint_path
    assert directory is not None
    method = checkpoint_method(model.config)
    if method in PACKED_METHODS:
        _save_blocks(model, packed_to_save(model, method), directory)
        return True
    if options.quantize not in BLOCK_FORMATS:
        with saving(directory):
            model.save_pretrained(directory)
        logger.info("weights of %.1f MiB written to %s", model.get_memory_footprint() / 2**20, directory)
    return False


def _save_blocks(model: Any, kept: Mapping[str, KeptLayer], directory: str) -> None:
    with saving(directory):
        save_blocks(model, kept, Path(directory))
    logger.info("weights of %.1f MiB written to %s", model.get_memory_footprint() / 2**20, directory)


def model_arguments(path: str, options: TransformersOptions, **more: Any) -> dict[str, Any]:
    """Return the arguments of `from_pretrained`; a worker with a GPU loads on it unless the options say otherwise.

    `more` are arguments that replace these. Raises ModelLoadError, also if torch cannot use a GPU of this worker.
    """
    gpus = NO_GPUS if options.is_on_cpu else usable_gpus()
    _refuse_absent_device(options, gpus.count)
    _refuse(options, options.device_problem(gpus.count > 0))
    config = load_config(path, options)
    arguments = {**_default_map(gpus.count), **options.engine_arguments(), **more}
    arguments.pop("quantization_config", None)
    arguments["dtype"] = _dtype(config, options, gpus)
    if gpus.count > 1 and arguments["device_map"] in STRATEGIES:
        arguments["max_memory"] = memory_limits(free_memory(gpus), free_and_total()[0])
    if is_gguf(path):
        refuse_sizes(config, path)
        dtype = torch.bfloat16 if arguments["dtype"] == "auto" else arguments["dtype"]
        return {**arguments, **gguf_weights(path), "dtype": dtype}
    _refuse(options, options.checkpoint_problem(config.to_dict()))  # before weights are quantised, which takes long
    packed = _packed_layers(config, path, options, arguments["dtype"], gpus.count)
    if packed is not None:
        check_quantization(options.quantize, config)
        return {**arguments, "config": packed}
    if checkpoint_method(config) == BLOCKS:
        raise ModelLoadError(
            f"{path}: weights in blocks are for one process on a CPU in bf16 or fp32, and are not saved again; use the"
            " checkpoint that they were made from"
        )
    if not gpus.count:
        refuse_gpu_layouts(config)
    return arguments | quantization_arguments(options, config, arguments["dtype"])


def _packed_layers(config: Any, path: str, options: TransformersOptions, dtype: torch.dtype | str, gpus: int) -> Any:
    """Return the config with which code of this project reads the packed layers of a checkpoint; None if it does not.

    It does in a worker of one process, on the CPU or on one GPU.
    """
    saves, in_blocks = options.save_mp_checkpoint_path is not None, checkpoint_method(config) == BLOCKS
    if gpus:
        is_mapped = isinstance(options.placement, Mapping)  # perhaps to main memory, too
        can_pack = gpus == 1 and not is_mapped and has_gpu_kernels()
    else:
        can_pack = not (saves and in_blocks) if dtype in _BLOCK_DTYPES else not (saves or in_blocks)
    return as_packed_layers(config, path, saves, gpus > 0) if can_pack and own_rank().size == 1 else None


def _refuse(options: TransformersOptions, problem: tuple[str, str] | None) -> None:
    if problem is not None:
        key, reason = problem
        value = getattr(options, key.removeprefix("option."))
        raise ModelLoadError(f"{key}={value} is not allowed; {reason}")


def _refuse_absent_device(options: TransformersOptions, gpus: int) -> None:
    if max(options.mapped_gpus, default=-1) >= gpus:
        raise ModelLoadError(
            f"option.device_map={excerpt(options.device_map or '')}: this worker has {gpus} CUDA devices;"
            " leave it out, set option.device_map=cpu, or raise option.tensor_parallel_degree"
        )


def _default_map(gpus: int) -> dict[str, str]:
    """Return the map for a worker's GPUs: all of them, as with LMI; each rank of a group has one."""
    rank = own_rank()
    if rank.size > 1 and gpus:
        return {"device_map": f"cuda:{rank.rank}"}
    return {"device_map": "cuda" if gpus == 1 else "auto"} if gpus else {}


def set_threads(threads: int | None) -> None:
    """Set the number of threads that torch uses inside an operation; None leaves it as it is."""
    if threads:
        torch.set_num_threads(threads)


def eos_token_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Return the ids of the tokens that end a text."""
    configured = model.generation_config.eos_token_id
    ids = configured if isinstance(configured, list) else [configured]
    return frozenset(token for token in (*ids, tokenizer.eos_token_id) if token is not None)


def forced_eos_token_ids(model: Any) -> tuple[int, ...]:
    """Return the tokens that end every text of full length, one of them each; () for nearly every model."""
    configured = model.generation_config.forced_eos_token_id
    return tuple(configured) if isinstance(configured, list) else () if configured is None else (int(configured),)


def sampling_defaults(model: Any) -> dict[str, float]:
    """Return the parameters of sampling that generation_config.json names, as vLLM takes them."""
    configured = model.generation_config.to_diff_dict()
    return {name: configured[name] for name in _SAMPLING if isinstance(configured.get(name), int | float)}


def from_pretrained(loader: Any, path: str, **arguments: Any) -> Any:
    """Call `loader.from_pretrained`. Raises ModelLoadError with the cause, and the damaged file if there is one."""
    try:
        with _weights_counted(), _unpacking_counted() if "gguf_file" in arguments else nullcontext():
            return loader.from_pretrained(path, **arguments)
    except SafetensorError as error:
        damaged = ", ".join(_damaged_weights(Path(path))) or path
        raise ModelLoadError(f"{damaged}: SafetensorError: {error}; the file is damaged, fetch it again") from error
    # The errors of transformers for a broken directory or file, for impossible sizes, for a lack of memory, and for a
    # missing package of a quantised checkpoint.
    except (*_BROKEN, OSError, RuntimeError, ImportError, MemoryError) as error:
        source = Path(path, arguments["gguf_file"]) if "gguf_file" in arguments else path
        if is_out_of_memory(error):
            raise ModelMemoryError(
                f"{source} does not fit into memory ({first_line(error)}); set option.quantize=bitsandbytes4, raise"
                " option.tensor_parallel_degree, or use a machine with more memory"
            ) from error
        raise ModelLoadError(f"{loader.__name__} cannot load {source}: {error}") from error


@contextmanager
def _weights_counted() -> Iterator[None]:
    """Report how many weights transformers has loaded, in place of the bar that it draws on stderr."""

    def count(bar: Callable[..., Any], given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        return _counted("loading weights", *given) if named.get("desc") == _WEIGHTS else bar(*given, **named)

    before = set_tqdm_hook(count)
    try:
        yield
    finally:
        set_tqdm_hook(before)


@contextmanager
def _unpacking_counted() -> Iterator[None]:
    """Report how many tensors of GGUF transformers has unpacked. Its bar for them asks no hook."""
    from transformers import modeling_gguf_pytorch_utils  # other models load without it

    bar = modeling_gguf_pytorch_utils.tqdm
    modeling_gguf_pytorch_utils.tqdm = lambda tensors, **_: _counted("unpacking weights", tensors)
    try:
        yield
    finally:
        modeling_gguf_pytorch_utils.tqdm = bar


def _counted(what: str, weights: Collection[_T]) -> Iterator[_T]:
    for done, weight in enumerate(weights):
        load_progress.report(what, done, len(weights), "tensors")
        yield weight
    load_progress.report(what, len(weights), len(weights), "tensors")


def _damaged_weights(directory: Path) -> Iterator[str]:
    """Yield the weight files with an unreadable header: transformers does not say which shard it failed at."""
    for path in sorted(directory.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt"):
                pass
        except SafetensorError:
            yield str(path)


def _origin(options: TransformersOptions) -> dict[str, Any]:
    return {"revision": options.revision, "trust_remote_code": options.trust_remote_code}


def _dtype(config: Any, options: TransformersOptions, gpus: TorchGpus) -> torch.dtype | str:
    if options.dtype in LONG_DTYPES:
        dtype: torch.dtype = getattr(torch, LONG_DTYPES[options.dtype])
        if dtype == torch.bfloat16 and lack_bf16(gpus):
            logger.warning("option.dtype=%s: %s; fp16 is faster", options.dtype, _BEFORE_BF16)
        return dtype
    stored = getattr(config, "dtype", None)
    if not gpus.count and stored == torch.float16:
        logger.warning(
            "the checkpoint is fp16, which the CPU has no kernels for: loading as bf16; set option.dtype=fp32"
        )
        return torch.bfloat16
    if stored == torch.bfloat16 and lack_bf16(gpus):
        logger.warning(
            "the checkpoint is bf16: %s: loading as fp16; set option.dtype=fp32 if it overflows", _BEFORE_BF16
        )
        return torch.float16
    return "auto"
