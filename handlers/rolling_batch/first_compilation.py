"""Compiles the CPU kernels in processes of their own, while a worker imports the libraries that load its model.

    python -m handlers.rolling_batch.first_compilation PARENT ELEMENT PART

This is for the first start on a kind of processor: numba keeps what it compiles, and later starts find it. Imports keep
one core busy, and no more, for about as long as two processes compile. What a worker needs beside these kernels it
compiles itself.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from handlers.rolling_batch.options import RollingBatchOptions
from lmi_server.machine.environment import own_rank, process_environment
from lmi_server.machine.inventory import shown_gpus
from lmi_server.machine.process_tree import end_with_parent

_log = logging.getLogger(__name__)

# Types of elements of activations in the kernels, by option.dtype, and by what config.json says.
_ELEMENTS = {"bf16": "uint16", "fp32": "float32", "bfloat16": "uint16", "float32": "float32"}
Call = tuple[Any, tuple[Any, ...]]  # a kernel, and arguments of the types that it is called with


class FirstCompilation:
    """Processes that compile the kernels for one type of elements."""

    def __init__(self, element: str, marker: Path) -> None:
        _log.info("Compiling kernels for this processor, for later starts as well (kept in %s)", marker.parent)
        self._began = time.monotonic()
        self._marker = marker
        command = [sys.executable, "-P", "-m", "handlers.rolling_batch.first_compilation", str(os.getpid()), element]
        self._processes = [subprocess.Popen([*command, part], stdin=subprocess.DEVNULL) for part in _PARTS]

    def wait(self) -> None:
        """Wait for the end. If a process fails, the kernels that it leaves are compiled by those who call them."""
        codes = [process.wait() for process in self._processes]
        seconds = time.monotonic() - self._began
        if any(codes):
            _log.warning("Compiling kernels ahead failed with exit codes %s after %.1f s", codes, seconds)
            return
        _log.info("Kernels compiled after %.1f s", seconds)
        mark_compiled(self._marker)

    def close(self) -> None:
        """End the processes that still run."""
        for process in self._processes:
            process.kill()
            process.wait()


def start(model_dir: str, options: RollingBatchOptions) -> FirstCompilation | None:
    """Start compiling; None if the kernels are there already, or if the model is likely to need none of these."""
    element = _element(Path(model_dir), options)
    if element is None or own_rank().size > 1 or shown_gpus(process_environment())[1]:
        return None
    marker = compiled_marker(element)
    return None if marker.exists() else FirstCompilation(element, marker)


def compiled_marker(element: str) -> Path:
    """Return the file that says, beside the compiled kernels, that they are there for this kind of processor."""
    from handlers.rolling_batch.cpu_kernels.compilation import SOURCES, target

    processor = hashlib.sha256(" ".join(target()).encode()).hexdigest()[:16]
    return compiled_kernels() / f"compiled_{element}_{SOURCES}_{processor}"


def compiled_kernels() -> Path:
    """Return the folder in which numba keeps the compiled kernels."""
    from handlers.rolling_batch.cpu_kernels.linear import linear

    kernel: Any = linear
    return Path(kernel.stats.cache_path)


def mark_compiled(marker: Path) -> None:
    try:
        marker.touch()
    except OSError as error:
        _log.info("Compiled kernels are not kept: %s", error)


def _element(model_dir: Path, options: RollingBatchOptions) -> str | None:
    dtype = getattr(options, "dtype", None)
    if dtype == "auto":
        try:
            config = json.loads((model_dir / "config.json").read_bytes())
        except (OSError, ValueError):
            return None
        dtype = (config.get("dtype") or config.get("torch_dtype")) if isinstance(config, dict) else None
    return _ELEMENTS.get(str(dtype))


def decoding_kernels(element: str) -> Iterator[Call]:
    """Yield the kernels that decode, with arguments of the types of a model whose elements are uint16 or float32."""
    from handlers.rolling_batch.cpu_kernels import attention
    from handlers.rolling_batch.cpu_kernels.arguments import (
        Activations,
        AttentionSettings,
        DecodeRows,
        LayerArrays,
        LayerSettings,
        SharedBlocks,
    )
    from handlers.rolling_batch.cpu_kernels.decoder import decoder_layers
    from handlers.rolling_batch.cpu_kernels.linear import linear

    places, rows, cache = _array("int64", 1), _array(element, 2), _array(element, 4)
    heads = np.zeros((4, 4, 4), element)[:, :, ::2]  # of any strides
    settings = AttentionSettings(1.0, 0, 0.0, 1)
    attended = _array(element, 3)
    yield attention.slot_attention, (heads, heads, heads, cache, cache, places, places, attended, settings)
    if element != "uint16":
        return
    bias, laid = _array(element, 1), _array("uint32", 3)
    yield linear, (rows, laid, bias, rows, 1)
    layer = LayerArrays(cache, cache, bias, laid, bias, laid, bias, bias, laid, bias, laid, bias)
    one_rank = SharedBlocks(heads, np.uintp(0), 0, _array("float32", 1))
    space = Activations(rows, rows, rows, attended, rows, rows)
    of_layers = (_array("uint64", 2), places, layer, bias, LayerSettings(1.0, 0.0, 1, 1.0, 1.0, 1.0))
    yield decoder_layers, (DecodeRows(rows, rows, rows, places, places), space, *of_layers, one_rank)


def other_kernels(element: str) -> Iterator[Call]:
    """Yield the kernels of samplers, single modules and prompts, as `decoding_kernels` does."""
    from handlers.rolling_batch.cpu_kernels import rows as kernels
    from handlers.rolling_batch.cpu_kernels.attention import write_rows
    from handlers.rolling_batch.cpu_kernels.chunk_attention import chunk_attention
    from handlers.rolling_batch.cpu_kernels.parallel import help_compute, wake_helpers

    rows, logits, masks = _array(element, 2), _array("float32", 2), _array("uint32", 2)
    places, chances, keys = _array("int64", 1), _array("float32", 1), _array("uint64", 1)
    yield kernels.argmax_rows, (rows, places)
    yield kernels.log_sum_exp_rows, (rows, chances)
    yield kernels.masked_argmax_rows, (rows, places, masks, places)
    yield kernels.mask_rows, (logits, places, masks)
    for drawn_from in {element: rows, "float32": logits}.values():
        yield kernels.draw_rows, (drawn_from, chances, keys, chances, chances, places)
    yield kernels.draw_columns, (logits, _array("int64", 2), keys, places)
    yield help_compute, (0,)
    yield wake_helpers, ()
    for compiled_now in (write_rows, chunk_attention):
        compiled_now(np.dtype(element))
    # Last, because `decoder_layers` contains these: the other process has mostly compiled them by now.
    yield kernels.rms_norm, (rows, _array(element, 1), 1.0, rows)
    yield kernels.rotate, (rows, rows, rows, 1)
    yield kernels.silu_and_mul, (rows, rows)


def _array(element: str, dimensions: int) -> np.ndarray:
    return np.zeros((4,) * dimensions, element)


_PARTS: Mapping[str, Callable[[str], Iterator[Call]]] = {"decoding": decoding_kernels, "others": other_kernels}


def main() -> None:
    end_with_parent()
    parent, element, part = sys.argv[1:]
    if os.getppid() != int(parent):  # it ended before end_with_parent could see it
        return
    import numba

    for kernel, arguments in _PARTS[part](element):
        kernel.compile(tuple(map(numba.typeof, arguments)))


if __name__ == "__main__":
    main()
