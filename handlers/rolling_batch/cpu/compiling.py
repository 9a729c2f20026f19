"""Compiles the CPU kernels of a model in two processes. `first_compilation.py` starts this program:

    python -m handlers.rolling_batch.cpu.compiling PARENT ELEMENT WEIGHTS KEPT

It imports little, so that it begins soon.
"""

from __future__ import annotations

import functools
import gc
import mmap
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from handlers.cpu_kernels.arguments import (
    Activations,
    AttentionSettings,
    DecodeRows,
    LayerArrays,
    LayerSettings,
    SharedBlocks,
)
from lmi_server.processes.parents import end_with_parent

PLAIN, BLOCKS, INT8_BLOCKS = "plain", "blocks", "int8_blocks"
"""Types of weights: elements, or blocks of few bits; then activations may take 8 bits."""
PROCESSES = 2
"""How many compile: this one and a fork."""
Call = tuple[Any, tuple[Any, ...]]  # a kernel, and arguments of the types that it is called with
Compile = Callable[[], object]


def first_kernels(element: str) -> Iterator[Call]:
    """Yield a kernel that others contain, with arguments of a model's types.

    `element` is that of its activations, uint16 (bfloat16) or float32.
    """
    from handlers.cpu_kernels.rows import rms_norm

    rows = _array(element, 2)
    yield rms_norm, (rows, _array(element, 1), 1.0, rows)


def layer_kernels(element: str, weights: str = PLAIN, kept: str | None = None) -> Iterator[Call]:
    """Yield the kernels of single modules, which `whole_kernels` call, as `first_kernels` does; long ones first."""
    from handlers.cpu_kernels import rows as kernels
    from handlers.cpu_kernels.attention.decoding import slot_attention
    from handlers.cpu_kernels.blocks.linear import block_linear, block_linear_in_vectors
    from handlers.cpu_kernels.int8.linear import block_linear_int8, block_linear_int8_in_vectors
    from handlers.cpu_kernels.linear import linear
    from handlers.cpu_kernels.threads.shared_memory import all_reduce

    rows, places = _array(element, 2), _array("int64", 1)
    linears = {
        ("uint16", PLAIN): linear,
        ("uint16", BLOCKS): block_linear,
        ("float32", BLOCKS): block_linear_in_vectors,
        ("uint16", INT8_BLOCKS): block_linear_int8,
        ("float32", INT8_BLOCKS): block_linear_int8_in_vectors,
    }
    if (element, weights) in linears:
        yield linears[element, weights], (rows, _laid(weights), _array(element, 1), rows, 1)
    heads, cache = _heads(element), _array(kept or element, 4)
    settings = AttentionSettings(1.0, 0, 0, 0.0, 1, _array("float32", 1))
    yield slot_attention, (heads, heads, heads, cache, cache, places, places, _array(element, 3), settings)
    yield kernels.rotate, (rows, rows, rows, 1)
    yield kernels.silu_and_mul, (rows, rows)
    if element == "uint16":
        yield all_reduce, (_array(element, 1), _array(element, 1), _one_rank(element))


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
    yield decoder_layers, (DecodeRows(rows, rows, rows, places, places), space, *of_layers, _one_rank(element))


def token_kernels(element: str) -> Iterator[Call]:
    """Yield the kernels that choose tokens, and those of helper threads, as `first_kernels` does; long ones first."""
    from handlers.cpu_kernels import rows as kernels
    from handlers.cpu_kernels.threads.parallel import help_compute, wake_helpers

    rows, logits, masks = _array(element, 2), _array("float32", 2), _array("uint32", 2)
    places, chances, keys = _array("int64", 1), _array("float32", 1), _array("uint64", 1)
    for drawn_from in {element: rows, "float32": logits}.values():
        yield kernels.draw_rows, (drawn_from, chances, keys, chances, chances, places)
    yield kernels.masked_argmax_rows, (rows, places, masks, places)
    yield kernels.argmax_rows, (rows, places, places)
    yield kernels.tell_tokens, (rows, places, places)
    yield kernels.log_sum_exp_rows, (rows, chances)
    yield kernels.mask_rows, (logits, places, masks)
    yield kernels.draw_columns, (logits, _array("int64", 2), keys, places)
    yield help_compute, (0,)
    yield wake_helpers, ()


def _prompt_kernels(element: str, kept: str) -> Iterator[Compile]:
    """Yield what compiles the kernels that functions make for types of elements; long ones first."""
    from handlers.cpu_kernels.attention.chunks import chunk_attention
    from handlers.cpu_kernels.attention.decoding import write_rows

    for compiled_now in (chunk_attention, write_rows):
        yield functools.partial(compiled_now, np.dtype(element), np.dtype(kept))


def _heads(element: str) -> np.ndarray:
    return np.zeros((4, 4, 4), element)[:, :, ::2]  # of any strides


def _one_rank(element: str) -> SharedBlocks:
    return SharedBlocks(_heads(element), np.uintp(0), 0, _array("float32", 1))


def _laid(weights: str) -> np.ndarray:
    """Return a weight of a linear layer."""
    return _array("uint32", 3) if weights == PLAIN else _array("int64", 1 if weights == BLOCKS else 2)


def _array(element: str, dimensions: int) -> np.ndarray:
    return np.zeros((4,) * dimensions, element)


def _compiling(kernels: Iterator[Call]) -> Iterator[Compile]:
    """Yield what compiles each kernel."""
    import numba

    for kernel, arguments in kernels:
        yield functools.partial(kernel.compile, tuple(map(numba.typeof, arguments)))


class Shared:
    """Work that processes share: parts, others, and wholes that need all parts.

    A whole would compile a part that is not done yet once more. So it is taken first of all as soon as the parts are
    done, by a process that has just finished something else.
    """

    def __init__(self, parts: Sequence[Compile], others: Sequence[Compile], wholes: Sequence[Compile]) -> None:
        self._work = [*parts, *others, *wholes]
        self._parts = len(parts)
        self._done = mmap.mmap(-1, max(len(self._work), 1))  # a byte for each; forks share it
        first_whole = len(self._work) - len(wholes)
        self._queue, self._wholes = _pipe_of(range(first_whole)), _pipe_of(range(first_whole, len(self._work)))

    def do(self) -> None:
        """Do what other processes have not taken, and write a byte for each to the standard output."""
        while taken := self._take():
            number = taken[0]
            self._work[number]()
            self._done[number] = 1
            os.write(sys.stdout.fileno(), b".")

    def _take(self) -> bytes:
        """Return a number as a byte; nothing if all is taken, but for wholes whose parts another process is at."""
        whole = os.read(self._wholes, 1) if all(self._done[: self._parts]) else b""
        return whole or os.read(self._queue, 1)


def _pipe_of(numbers: range) -> int:
    """Return the end of a pipe from which these numbers, below 256, can be read."""
    reading, writing = os.pipe()
    os.write(writing, bytes(numbers))
    os.close(writing)
    return reading


class Types(NamedTuple):
    """For which types kernels are compiled: elements of activations, weights, and elements of the KV cache."""

    element: str
    weights: str
    kept: str

    def shared(self) -> Shared:
        """Return the kernels that two processes compile."""
        parts, wholes = (_compiling(kernels(*self)) for kernels in (layer_kernels, whole_kernels))
        others = (*_prompt_kernels(self.element, self.kept), *_compiling(token_kernels(self.element)))
        return Shared([*parts], others, [*wholes])


def _compile(work: Shared, parent: int) -> None:
    """Take part in the work; end with the parent."""
    end_with_parent()
    if os.getppid() != parent:  # it ended before end_with_parent could see it
        sys.exit(1)
    work.do()


def main() -> int:
    """Compile the kernels for the types that the arguments name; return the exit code of the second process."""
    parent, types = int(sys.argv[1]), Types(*sys.argv[2:])
    gc.disable()  # what numba makes of a kernel stays in use, so that a collection takes time and frees nothing
    _compile(Shared([*_compiling(first_kernels(types.element))], (), ()), parent)
    # Two processes do the rest. A fork has what numba needs half a second for when it first compiles.
    work = types.shared()
    other = multiprocessing.get_context("fork").Process(target=_compile, args=(work, os.getpid()))
    other.start()
    work.do()
    other.join()
    return abs(other.exitcode or 0)


if __name__ == "__main__":
    sys.exit(main())
