"""Starts the processes that compile the CPU kernels while a worker imports the libraries that load its model.

This is for the first start on a kind of processor: what is compiled is kept, and later starts find it. Imports keep
one core busy, and no more, for about as long as two processes compile. What a worker needs beside these kernels it
compiles itself.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from handlers.checkpoints.blocks import free_cores
from handlers.checkpoints.options import QUANTIZATION, TransformersOptions
from handlers.cpu_kernels.compilation import kernel_files
from handlers.rolling_batch.cpu.compiling import BLOCKS, INT8_BLOCKS, PLAIN, PROCESSES
from handlers.rolling_batch.options import RollingBatchOptions
from lmi_server.machine.environment import own_rank, process_environment
from lmi_server.machine.inventory import shown_gpus
from lmi_server.processes import load_progress

logger = logging.getLogger(__name__)

# Types of elements of activations in the kernels, by option.dtype, and by what config.json says.
_ELEMENTS = {"bf16": "uint16", "fp32": "float32", "bfloat16": "uint16", "float32": "float32"}
_PACKED_ELEMENTS = {"int8": "int8", "fp8": "uint8"}  # of a KV cache, by option.kv_cache_dtype
# What config.json calls checkpoints that are read as blocks: their methods, and the format of compressed-tensors.
_PACKED, _INTEGERS = ("gptq", "awq", "bitsandbytes", "blocks"), "pack-quantized"
_COMPILING = "compiling kernels for this processor"


class FirstCompilation:
    """Processes that compile the kernels for one type of elements, one of weights, and one that the KV cache keeps.

    Types of weights are PLAIN, BLOCKS and INT8_BLOCKS.
    """

    def __init__(self, element: str, weights: str, marker: Path, kept: str | None = None) -> None:
        logger.info("Compiling kernels for this processor, for later starts as well (kept in %s)", marker.parent)
        self._began = time.monotonic()
        self._marker = marker
        command = [
            sys.executable,
            "-P",
            "-m",
            "handlers.rolling_batch.cpu.compiling",
            str(os.getpid()),
            element,
            weights,
            kept or element,
        ]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        free_cores.set_busy(PROCESSES)

    def wait(self) -> None:
        """Wait for the end. If a process fails, its remaining kernels are compiled by their callers."""
        self._report_kernels()
        code = self._process.wait()
        free_cores.set_busy(0)
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
        free_cores.set_busy(0)
        self._process.stdout.close()


def start(model_dir: str, options: RollingBatchOptions) -> FirstCompilation | None:
    """Start compiling; None if the kernels are there already, or if the model is likely to need none of these."""
    element = _element(Path(model_dir), options)
    if element is None or own_rank().size > 1 or shown_gpus(process_environment())[1]:
        return None
    weights = _weights(Path(model_dir), options)
    kept = element if options.packed_kv_dtype is None else _PACKED_ELEMENTS[options.packed_kv_dtype]
    marker = compiled_marker(element, weights, kept)
    if marker is None or kernel_files.is_trusted(marker):
        return None
    return FirstCompilation(element, weights, marker, kept)


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
        kernel_files.write(marker, b"")
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
    """Return blocks if options or checkpoint say so; most layers of such a model are computed as blocks."""
    if not isinstance(options, TransformersOptions):
        return PLAIN
    declared = _config(model_dir).get("quantization_config")
    found = declared if isinstance(declared, dict) else {}
    packed = (
        options.quantize in QUANTIZATION or found.get("quant_method") in _PACKED or found.get("format") == _INTEGERS
    )
    if not packed and not options.keeps_blocks(str(model_dir)):
        return PLAIN
    return INT8_BLOCKS if options.activation_dtype == "int8" else BLOCKS


def _config(model_dir: Path) -> dict[str, Any]:
    """Return what config.json says, nothing if it cannot be read."""
    try:
        config = json.loads((model_dir / "config.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}
