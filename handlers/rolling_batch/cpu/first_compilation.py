"""Compiles the CPU kernels in processes of their own, while a worker imports the libraries that load its model.

    python -m handlers.rolling_batch.cpu.first_compilation PARENT ELEMENT WEIGHTS KEPT

This is for the first start on a kind of processor: numba keeps what it compiles, and later starts find it. Imports keep
one core busy, and no more, for about as long as two processes compile. What a worker needs beside these kernels it
compiles itself.
"""

from __future__ import annotations

import functools
import gc
import json
import logging
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from handlers.checkpoints.options import QUANTIZATION, TransformersOptions
from handlers.cpu_kernels.arguments import (
    Activations,
    AttentionSettings,
    DecodeRows,
    LayerArrays,
    LayerSettings,
    SharedBlocks,
)
from handlers.cpu_kernels.compilation.kernel_files import is_trusted
from handlers.rolling_batch.options import RollingBatchOptions
from lmi_server.machine.environment import own_rank, process_environment
from lmi_server.machine.inventory import shown_gpus
from lmi_server.processes import load_progress
from lmi_server.processes.parents import end_with_parent

logger = logging.getLogger(__name__)

# Types of elements of activations in the kernels, by option.dtype, and by what config.json says.
_ELEMENTS = {"bf16": "uint16", "fp32": "float32", "bfloat16": "uint16", "float32": "float32"}
_PACKED_ELEMENTS = {"int8": "int8", "fp8": "uint8"}  # of a KV cache, by option.kv_cache_dtype
# What config.json calls checkpoints that are read as blocks: their methods, and the format of compressed-tensors.
_PACKED, _INTEGERS = ("gptq", "awq", "bitsandbytes", "blocks"), "pack-quantized"
_COMPILING = "compiling kernels for this processor"
PLAIN, BLOCKS = "plain", "blocks"
"""Types of weights: elements, or blocks of few bits."""
Call = tuple[Any, tuple[Any, ...]]  # a kernel, and arguments of the types that it is called with
Compile = Callable[[], object]


class FirstCompilation:
    """Processes that compile the kernels for one type of elements, one of weights, and one that the KV cache keeps.

    Types of weights are PLAIN and BLOCKS.
    """

    def __init__(self, element: str, weights: str, marker: Path, kept: str | None = None) -> None:
        logger.info("Compiling kernels for this processor, for later starts as well (kept in %s)", marker.parent)
        self._began = time.monotonic()
        self._marker = marker
        command = [
            sys.executable,
            "-P",
            "-m",
            "handlers.rolling_batch.cpu.first_compilation",
            str(os.getpid()),
            element,
            weights,
            kept or element,
        ]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)

    def wait(self) -> None:
        """Wait for the end. If a process fails, its remaining kernels are compiled by their callers."""
        self._report_kernels()
        code = self._process.wait()
        seconds = time.monotonic() - self._began
        if code:
            logger.warning("Compiling kernels ahead failed with exit code %d after %.1f s", code, seconds)
            return
        logger.info("Kernels compiled after %.1f s", seconds)
        mark_compiled(self._marker)

    def _report_kernels(self) -> None:
        """Report how many kernels there are by now; each is a byte in the pipe, which ends with the processes."""
        assert self._process.stdout is not None
        done = 0
        load_progress.report(_COMPILING)
        while more := os.read(self._process.stdout.fileno(), 4096):
            done += len(more)
            load_progress.report(_COMPILING, done, unit="kernels")

    def close(self) -> None:
        """End the processes if they still run."""
        assert self._process.stdout is not None
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()


def start(model_dir: str, options: RollingBatchOptions) -> FirstCompilation | None:
    """Start compiling; None if the kernels are there already, or if the model is likely to need none of these."""
    element = _element(Path(model_dir), options)
    if element is None or own_rank().size > 1 or shown_gpus(process_environment())[1]:
        return None
    weights = _weights(Path(model_dir), options)
    kept = element if options.packed_kv_dtype is None else _PACKED_ELEMENTS[options.packed_kv_dtype]
    marker = compiled_marker(element, weights, kept)
    return None if marker is None or is_trusted(marker) else FirstCompilation(element, weights, marker, kept)


def compiled_marker(element: str, weights: str, kept: str) -> Path | None:
    """Return the file that says, beside the compiled kernels, that they are there for this kind of processor.

    None if compiled kernels are not kept.
    """
    from handlers.cpu_kernels.compilation.decorators import SOURCES, TARGET

    folder = compiled_kernels()
    return None if folder is None else folder / f"compiled_{element}_{weights}_{kept}_{SOURCES}_{TARGET}"


def compiled_kernels() -> Path | None:
    """Return the folder in which numba keeps the compiled kernels, None if it keeps none."""
    from handlers.cpu_kernels.linear import linear

    kernel: Any = linear
    path = kernel.stats.cache_path
    return None if path is None else Path(path)


def mark_compiled(marker: Path) -> None:
    try:
        marker.touch()
    except OSError as error:
        logger.info("Compiled kernels are not kept: %s", error)


def _element(model_dir: Path, options: RollingBatchOptions) -> str | None:
    dtype = getattr(options, "dtype", None)
    if dtype == "auto":
        if model_dir.suffix == ".gguf":
            return "uint16"
        config = _config(model_dir)
        dtype = config.get("dtype") or config.get("torch_dtype")
    return _ELEMENTS.get(str(dtype))


def _weights(model_dir: Path, options: RollingBatchOptions) -> str:
    """Return BLOCKS if options or checkpoint say so; most layers of such a model are computed as blocks."""
    if not isinstance(options, TransformersOptions):
        return PLAIN
    declared = _config(model_dir).get("quantization_config")
    found = declared if isinstance(declared, dict) else {}
    packed = (
        options.quantize in QUANTIZATION or found.get("quant_method") in _PACKED or found.get("format") == _INTEGERS
    )
    return BLOCKS if packed or options.keeps_blocks(str(model_dir)) else PLAIN


def _config(model_dir: Path) -> dict[str, Any]:
    """Return what config.json says, nothing if it cannot be read."""
    try:
        config = json.loads((model_dir / "config.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def first_kernels(element: str) -> Iterator[Call]:
    """Yield a kernel that others contain, with arguments of a model's types.

    `element` is that of its activations, uint16 (bfloat16) or float32.
    """
    from handlers.cpu_kernels.rows import rms_norm

    rows = _array(element, 2)
    yield rms_norm, (rows, _array(element, 1), 1.0, rows)


def single_kernels(element: str, weights: str = PLAIN, kept: str | None = None) -> Iterator[Call]:
    """Yield the kernels of single modules, and kernels that choose tokens, as `first_kernels` does; long ones first."""
    from handlers.cpu_kernels import rows as kernels
    from handlers.cpu_kernels.attention.decoding import slot_attention
    from handlers.cpu_kernels.blocks.linear import block_linear, block_linear_in_vectors
    from handlers.cpu_kernels.linear import linear
    from handlers.cpu_kernels.threads.parallel import help_compute, wake_helpers

    rows, logits, masks = _array(element, 2), _array("float32", 2), _array("uint32", 2)
    places, chances, keys = _array("int64", 1), _array("float32", 1), _array("uint64", 1)
    if weights == BLOCKS:
        by_element = {"uint16": block_linear, "float32": block_linear_in_vectors}
        yield by_element[element], (rows, _laid(weights), _array(element, 1), rows, 1)
    elif element == "uint16":
        yield linear, (rows, _laid(weights), _array(element, 1), rows, 1)
    heads, cache, settings = _heads(element), _array(kept or element, 4), AttentionSettings(1.0, 0, 0, 0.0, 1, chances)
    yield slot_attention, (heads, heads, heads, cache, cache, places, places, _array(element, 3), settings)
    yield kernels.rotate, (rows, rows, rows, 1)
    yield kernels.silu_and_mul, (rows, rows)
    for drawn_from in {element: rows, "float32": logits}.values():
        yield kernels.draw_rows, (drawn_from, chances, keys, chances, chances, places)
    yield kernels.masked_argmax_rows, (rows, places, masks, places)
    yield kernels.argmax_rows, (rows, places)
    yield kernels.log_sum_exp_rows, (rows, chances)
    yield kernels.mask_rows, (logits, places, masks)
    yield kernels.draw_columns, (logits, _array("int64", 2), keys, places)
    yield help_compute, (0,)
    yield wake_helpers, ()


def whole_kernels(element: str, weights: str = PLAIN, kept: str | None = None) -> Iterator[Call]:
    """Yield the kernel that calls several of the others, as `first_kernels` does."""
    from handlers.cpu_kernels.decoder import decoder_layers

    if element != "uint16":
        return
    places, rows, attended, cache = (
        _array("int64", 1),
        _array(element, 2),
        _array(element, 3),
        _array(kept or element, 4),
    )
    bias, laid = _array(element, 1), _laid(weights)
    layer = LayerArrays(cache, cache, bias, laid, bias, laid, bias, bias, laid, bias, laid, bias)
    space = Activations(rows, rows, rows, attended, rows, rows)
    of_layers = (_array("uint64", 2), places, layer, bias, LayerSettings(1.0, 0.0, 1, 1.0, 1.0, 1.0))
    of_rows = DecodeRows(rows, rows, rows, places, places)
    one_rank = SharedBlocks(_heads(element), np.uintp(0), 0, _array("float32", 1))
    yield decoder_layers, (of_rows, space, *of_layers, one_rank)


def _prompt_kernels(element: str, kept: str | None) -> Iterator[Compile]:
    """Yield what compiles the kernels that functions make for types of elements; long ones first."""
    from handlers.cpu_kernels.attention.chunks import chunk_attention
    from handlers.cpu_kernels.attention.decoding import write_rows

    for compiled_now in (chunk_attention, write_rows):
        yield functools.partial(compiled_now, np.dtype(element), np.dtype(kept or element))


def _heads(element: str) -> np.ndarray:
    return np.zeros((4, 4, 4), element)[:, :, ::2]  # of any strides


def _laid(weights: str) -> np.ndarray:
    """Return a weight of a linear layer."""
    return _array("int64", 1) if weights == BLOCKS else _array("uint32", 3)


def _array(element: str, dimensions: int) -> np.ndarray:
    return np.zeros((4,) * dimensions, element)


def _compiling(kernels: Iterator[Call]) -> Iterator[Compile]:
    """Yield what compiles each kernel."""
    import numba

    for kernel, arguments in kernels:
        yield functools.partial(kernel.compile, tuple(map(numba.typeof, arguments)))


def _share(work: Sequence[Compile], queue: int, parent: int) -> None:
    """Do what other processes have not taken from the queue, a pipe with a byte for each; end with the parent."""
    end_with_parent()
    if os.getppid() != parent:  # it ended before end_with_parent could see it
        sys.exit(1)
    while number := os.read(queue, 1):
        work[number[0]]()
        os.write(sys.stdout.fileno(), b".")


def main() -> int:
    parent, element, weights, kept = int(sys.argv[1]), *sys.argv[2:]
    gc.disable()  # what numba makes of a kernel stays in use, so that a collection takes time and frees nothing
    first = [*_compiling(first_kernels(element))]
    # The last one finds the kernels that it calls on the disk; any process may have compiled them.
    single, whole = single_kernels(element, weights, kept), whole_kernels(element, weights, kept)
    rest = [*_prompt_kernels(element, kept), *_compiling(single), *_compiling(whole)]
    _share(first, _queue(len(first)), parent)
    # Two processes do the rest. A fork has what numba needs half a second for when it first compiles.
    queue = _queue(len(rest))
    other = multiprocessing.get_context("fork").Process(target=_share, args=(rest, queue, os.getpid()))
    other.start()
    _share(rest, queue, parent)
    other.join()
    return abs(other.exitcode or 0)


def _queue(length: int) -> int:
    """Return the end of a pipe from which the numbers up to a length, below 256, can be read."""
    reading, writing = os.pipe()
    os.write(writing, bytes(range(length)))
    os.close(writing)
    return reading


if __name__ == "__main__":
    sys.exit(main())
