"""Up to how many rows linear layers of blocks multiply weights as they are stored, as measured on this machine."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import nn

from handlers.checkpoints.blocks.layers import BlockLinear
from handlers.rolling_batch.cpu.kernel_choice import ALL, Crossovers, Work
from handlers.rolling_batch.cpu.large_pages import use_large_pages

# For 32 rows an AMD EPYC takes 1.05 to 1.12 times as long if it doesn't unpack, which other borders take for no gain.
_MIN_GAIN = 1.02
_READ = 32 * 2**20  # bytes of weights that are measured: more than caches hold


def limit_exact_rows(model: nn.Module, crossovers: Crossovers) -> int:
    """Set it for all such layers of `model`; return how many these are."""
    alike: dict[str, list[BlockLinear]] = {}
    modules = [module for module in model.modules() if isinstance(module, BlockLinear)]
    use_large_pages(module.laid for module in modules)
    for module in modules:
        kind = type(module).__name__
        name = f"{kind} {'+'.join(module.formats)} {module.in_features} x {module.out_features} {module.dtype}"
        alike.setdefault(name, []).append(module)
    for name, linears in alike.items():
        crossover = _crossover(name, linears[: max(1, _READ // linears[0].laid.nbytes)], crossovers)
        for linear in linears:
            linear.limit_exact_rows(min(crossover, linear.max_exact_rows))
    return len(modules)


def _crossover(name: str, linears: list[BlockLinear], crossovers: Crossovers) -> int:
    def passes(exact_rows: int) -> Callable[[int], Work]:
        def of(rows: int) -> Work:
            hidden = torch.ones((rows, linears[0].in_features), dtype=linears[0].dtype)
            modules = itertools.cycle(linears)

            def work() -> object:
                linear = next(modules)
                linear.limit_exact_rows(exact_rows)
                return linear(hidden)

            return work

        return of

    with torch.inference_mode():
        most, unmeasured = linears[0].max_exact_rows, linears[0].unmeasured_rows
        return crossovers.crossover(name, passes(ALL), passes(0), most=most, unmeasured=unmeasured, min_gain=_MIN_GAIN)
