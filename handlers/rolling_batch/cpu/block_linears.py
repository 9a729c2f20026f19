"""Up to how many rows linear layers of blocks multiply weights as they are stored, as measured on this machine.

So is from how many rows on tile registers multiply bytes, in layers that allow it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from handlers.checkpoints.blocks.layers import BlockLinear
from handlers.rolling_batch.cpu.kernel_choice import ALL, Crossovers, Work
from handlers.rolling_batch.cpu.large_pages import use_large_pages

# For 32 rows an AMD EPYC takes 1.05 to 1.12 times as long if it doesn't unpack, which other borders take for no gain.
_MIN_GAIN = 1.02
# One scale for a row rounds more than one for each 32 inputs: perplexity rose by 2.5 to 4.4 %.
_MIN_GAIN_OF_TILES = 1.2
_READ = 32 * 2**20  # bytes of weights that are measured: more than caches hold


def limit_exact_rows(model: nn.Module, crossovers: Crossovers) -> int:
    """Set it for all such layers of `model`; return how many these are."""
    alike: dict[str, list[BlockLinear]] = {}
    modules = [module for module in model.modules() if isinstance(module, BlockLinear)]
    use_large_pages(module.laid for module in modules)
    for module in modules:
        kind = f"{type(module).__name__}{' for tiles' if module.has_tiles else ''}"
        name = f"{kind} {'+'.join(module.formats)} {module.in_features} x {module.out_features} {module.dtype}"
        alike.setdefault(name, []).append(module)
    for name, linears in alike.items():
        measured = linears[: max(1, _READ // linears[0].laid.nbytes)]
        if linears[0].has_tiles:
            unpacked_rows = _unpacked_rows(name, measured, crossovers)
            for linear in linears:
                linear.limit_unpacked_rows(unpacked_rows)
        crossover = _crossover(name, measured, crossovers)
        for linear in linears:
            linear.limit_exact_rows(min(crossover, linear.max_exact_rows))
    return len(modules)


def _crossover(name: str, linears: list[BlockLinear], crossovers: Crossovers) -> int:
    few, many = (_passes(linears, partial(BlockLinear.limit_exact_rows, rows=rows)) for rows in (ALL, 0))
    with torch.inference_mode():
        most, unmeasured = linears[0].max_exact_rows, linears[0].unmeasured_rows
        return crossovers.crossover(name, few, many, most=most, unmeasured=unmeasured, min_gain=_MIN_GAIN)


def _unpacked_rows(name: str, linears: list[BlockLinear], crossovers: Crossovers) -> int:
    """Return up to how many rows weights are unpacked: more rows are faster as bytes in tile registers."""

    def limit(linear: BlockLinear, rows: int) -> None:
        linear.limit_exact_rows(0)
        linear.limit_unpacked_rows(rows)

    few, many = (_passes(linears, partial(limit, rows=rows)) for rows in (ALL, 0))
    with torch.inference_mode():
        return crossovers.crossover(f"{name} before tiles of bytes", few, many, min_gain=_MIN_GAIN_OF_TILES)


def _passes(linears: list[BlockLinear], limit: Callable[[BlockLinear], None]) -> Callable[[int], Work]:
    """Return the work of some rows: each time another layer, whose way of computing `limit` has set."""

    def passes(rows: int) -> Work:
        hidden = torch.ones((rows, linears[0].in_features), dtype=linears[0].dtype)
        modules = itertools.cycle(linears)

        def work() -> object:
            linear = next(modules)
            limit(linear)
            return linear(hidden)

        return work

    return passes
