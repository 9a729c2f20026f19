"""Up to how many rows linear layers of blocks multiply weights as they are stored, as measured on this machine."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import nn

from handlers.checkpoints.blocks.layers import BlockLinear
from handlers.checkpoints.blocks.layout import FEW_ROWS
from handlers.cpu_kernels.blocks.layout import EXACT_ROWS
from handlers.rolling_batch.cpu.kernel_choice import ALL, Crossovers, Work
from handlers.rolling_batch.cpu.large_pages import use_large_pages

_MAX_ROWS = 8  # more are always unpacked: reading takes no longer than multiplying them
_READ = 32 * 2**20  # bytes of weights that are measured: more than caches hold


def limit_exact_rows(model: nn.Module, crossovers: Crossovers) -> int:
    """Set it for all such layers of `model`; return how many these are."""
    alike: dict[str, list[BlockLinear]] = {}
    modules = [module for module in model.modules() if isinstance(module, BlockLinear)]
    use_large_pages(module.laid for module in modules)
    for module in modules:
        name = f"{'+'.join(module.formats)} {module.in_features} x {module.out_features} {module.dtype}"
        alike.setdefault(name, []).append(module)
    for name, linears in alike.items():
        crossover = _crossover(name, linears[: max(1, _READ // linears[0].laid.nbytes)], crossovers)
        for linear in linears:
            linear.laid[EXACT_ROWS] = min(crossover, _MAX_ROWS)
    return len(modules)


def _crossover(name: str, linears: list[BlockLinear], crossovers: Crossovers) -> int:
    def passes(exact_rows: int) -> Callable[[int], Work]:
        def of(rows: int) -> Work:
            hidden = torch.ones((rows, linears[0].in_features), dtype=linears[0].dtype)
            modules = itertools.cycle(linears)

            def work() -> object:
                linear = next(modules)
                linear.laid[EXACT_ROWS] = exact_rows
                return linear(hidden)

            return work

        return of

    with torch.inference_mode():
        return crossovers.crossover(name, passes(ALL), passes(0), most=_MAX_ROWS, unmeasured=FEW_ROWS)
