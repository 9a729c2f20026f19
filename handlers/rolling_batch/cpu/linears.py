"""Linear layers of bfloat16 whose weights are laid out for the CPU once, when the model loads.

Decoding a few rows is bound by reading weights, so the layout has to let every core read its part in order, with no
conversion on the way. oneDNN has such layouts, but torch converts a plain weight to them in every call, and looks up
compiled code by the shapes of the operands, which for few rows takes as long as the product.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import torch
from torch import nn

from handlers.cpu_kernels.arrays import as_numpy
from handlers.rolling_batch.cpu.kernel_choice import ALL, Crossovers, Work
from handlers.rolling_batch.cpu.large_pages import use_large_pages
from handlers.rolling_batch.fused.modules import is_plain
from handlers.torch_operators import probes
from handlers.torch_operators.read_weights import read_weights

_DECODE_ROWS = 32  # the number of rows that oneDNN lays weights out for; it computes others with the same layout
# Bytes of weights that are measured: more than caches hold if reading them counts, fewer from _MANY_ROWS rows on.
_READ, _MULTIPLIED, _MANY_ROWS = 32 * 2**20, 8 * 2**20, 64


def lay_out_linears(model: nn.Module, crossovers: Crossovers, spared: Collection[nn.Module] = ()) -> int:
    """Replace the plain bfloat16 linear layers of `model` by the kind that is fastest on this CPU; return how many.

    The modules in `spared` have their weights read directly.
    """
    packs = probes.packs_linears()
    places: dict[tuple[int, int, bool], list[tuple[nn.Module, str]]] = {}
    for module in list(model.modules()):
        kind_of_module: Any = type(module)  # mypy takes a type of modules for unhashable
        for name, child in module.named_children():
            is_ours = is_plain(child) and child.weight.dtype == torch.bfloat16 and child not in spared
            if is_ours and name not in read_weights(kind_of_module):
                places.setdefault((*child.weight.shape, child.bias is not None), []).append((module, name))
    laid: list[TiledLinear | PackedLinear] = []
    for shape, alike in places.items():
        kind = _kind([getattr(*place) for place in alike], crossovers) if packs else _tiled(shape[1])
        if kind is None:
            continue
        for place in alike:
            laid.append(kind(getattr(*place)))
            setattr(*place, laid[-1])
    use_large_pages(memory for linear in laid if (memory := linear.memory()) is not None)
    return len(laid)


Kind = Callable[[nn.Linear], "TiledLinear | PackedLinear"]


def _tiled(inputs: int) -> Kind | None:
    """Without AVX-512 oneDNN has no bfloat16, and torch converts a weight to float32 in every call."""
    return TiledLinear if inputs % 2 == 0 else None


def _kind(linears: list[nn.Linear], crossovers: Crossovers) -> Kind:
    """Return how to compute linear layers of one shape: by the project's kernel, by oneDNN, or each up to some rows."""
    first = linears[0]
    if first.in_features % 2:
        return PackedLinear
    sample = [linears[: max(1, read // first.weight.nbytes)] for read in (_READ, _MULTIPLIED)]

    @functools.cache  # only if the crossover is not known yet
    def built() -> list[tuple[TiledLinear, PackedLinear]]:
        return [(TiledLinear(linear), PackedLinear(linear)) for linear in sample[0]]

    def passes(place: int) -> Callable[[int], Work]:
        def of(rows: int) -> Work:
            hidden = torch.ones((rows, first.in_features), dtype=torch.bfloat16)
            modules = itertools.cycle([pair[place] for pair in built()[: len(sample[rows >= _MANY_ROWS])]])
            return lambda: next(modules)(hidden)

        return of

    biased = "" if first.bias is None else " and bias"
    with torch.inference_mode():
        crossover = crossovers.crossover(f"{first.in_features} x {first.out_features}{biased}", passes(0), passes(1))
    if crossover == ALL:
        return TiledLinear
    if reads_tiles(first):  # asked last: it lays a weight out twice
        return functools.partial(TiledLinear, max_rows=crossover)
    return TiledLinear if crossover >= _DECODE_ROWS else PackedLinear


def reads_tiles(linear: nn.Linear) -> bool:
    """Whether oneDNN lays this weight out as the project's kernel does, so that both can read one copy of it."""
    packed = _packed(linear)
    laid, words = _laid_weight(linear.weight.detach()), _words(packed)
    return words is not None and np.array_equal(words, laid.reshape(-1))


class TiledLinear(nn.Module):
    """A linear layer of bfloat16 for the project's own kernel, with its weight in that kernel's layout.

    No code is looked up, which is most of oneDNN's time for few rows. A row gets the same bits whatever
    other rows are in the batch, which oneDNN does not promise. More than `max_rows` rows are left to oneDNN, which
    reads the same copy of the weight; oneDNN has to lay out its shape in the same way.
    """

    def __init__(self, linear: nn.Linear, max_rows: int = ALL) -> None:
        super().__init__()
        from handlers.cpu_kernels.linear import linear as kernel

        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.max_rows = max_rows
        packed = None if max_rows == ALL else PackedLinear(linear)
        self.laid = _laid_weight(linear.weight.detach()) if packed is None else packed.laid()
        # Not the module: as one of the model's it would count as a layer that oneDNN computes with any number of rows.
        self._by_onednn = None if packed is None else packed.forward
        self.is_padded = self.laid.shape[1] * 2 > self.in_features
        self.added = as_numpy(torch.empty(0, dtype=torch.bfloat16) if linear.bias is None else linear.bias.detach())
        self._kernel = kernel
        self._threads = torch.get_num_threads()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(..., in_features) -> (..., out_features)."""
        rows = hidden.reshape(-1, self.in_features).contiguous()
        if self._by_onednn is not None and len(rows) > self.max_rows:
            return self._by_onednn(hidden)
        out = rows.new_empty((rows.shape[0], self.out_features))
        self.compute(as_numpy(rows), as_numpy(out))
        return out.view(*hidden.shape[:-1], self.out_features)

    def compute(self, rows: np.ndarray, out: np.ndarray) -> None:
        """Do it for up to `max_rows` rows (n, in_features) as the kernel takes them, into `out`."""
        self._kernel(rows, self.laid, self.added, out, self._threads)

    def memory(self) -> np.ndarray:
        """Return the weight as it lies in memory."""
        return self.laid


def _laid_weight(weight: torch.Tensor) -> np.ndarray:
    """(out_features, in_features) bfloat16 -> (panels, words, PANEL_COLUMNS) uint32.

    A panel has the weights of PANEL_COLUMNS outputs. Each of its words has those of two neighbouring inputs, as the
    bfloat16 instructions of AVX-512 and AMX take them. Zeros fill up the last panel, and the last words of each.
    """
    from handlers.cpu_kernels.linear import PANEL_COLUMNS, PANEL_WORDS

    outputs, inputs = weight.shape
    panels = -(-outputs // PANEL_COLUMNS)
    padded = nn.functional.pad(weight, (0, -inputs % (2 * PANEL_WORDS), 0, panels * PANEL_COLUMNS - outputs))
    words = padded.contiguous().view(torch.int32).unflatten(0, (panels, PANEL_COLUMNS))
    laid: np.ndarray = words.transpose(1, 2).contiguous().numpy().view(np.uint32)
    return laid


class PackedLinear(nn.Module):
    """A linear layer whose bfloat16 weight is laid out for oneDNN once instead of in every call.

    The operators are the ones that the freezing pass of torch.compile emits for a constant weight.
    """

    max_rows = 0  # that the project's kernel computes

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._weight = _packed(linear)
        self._bias = None if linear.bias is None else linear.bias.detach()
        self._linear = torch.ops.mkldnn._linear_pointwise.default

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(..., in_features) -> (..., out_features)."""
        return self._linear(hidden, self._weight, self._bias, "none", [], "")

    def memory(self) -> np.ndarray | None:
        """Return the weight as it lies in memory, (words,) uint32, if torch says where."""
        return _words(self._weight)

    def laid(self) -> np.ndarray:
        """Return the weight as a view in the form of `_laid_weight`, if oneDNN has laid it out so."""
        from handlers.cpu_kernels.linear import PANEL_COLUMNS

        words = self.memory()
        assert words is not None
        return words.reshape(-(-self.out_features // PANEL_COLUMNS), -1, PANEL_COLUMNS)


def _packed(linear: nn.Linear) -> torch.Tensor:
    """Return the weight as oneDNN lays it out: a tensor that only oneDNN's operators take."""
    return torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _DECODE_ROWS)


def _words(packed: torch.Tensor) -> np.ndarray | None:
    """Return the memory of a weight that oneDNN has laid out, (words,) uint32; None if torch does not say where it is.

    torch.compile asks for it in this way to write such weights into a file.
    """
    if not hasattr(torch.ops.mkldnn, "data_ptr") or not hasattr(torch.ops.mkldnn, "_nbytes"):
        return None
    count = torch.ops.mkldnn._nbytes(packed) // 4
    memory: Any = (ctypes.c_uint32 * count).from_address(torch.ops.mkldnn.data_ptr(packed))
    memory.owner = packed  # the array keeps its memory alive
    return np.frombuffer(memory, np.uint32)
