"""Up to how many rows linear layers of blocks multiply their weights unrounded, as measured on this machine."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import nn

from handlers.checkpoints.blocks.layers import BlockLinear
from handlers.cpu_kernels.blocks.layout import EXACT_ROWS
from handlers.rolling_batch.cpu.kernel_choice import ALL, Crossovers, Work

_READ = 32 * 2**20  # bytes of weights that are measured: more than caches hold


def limit_exact_rows(model: nn.Module, crossovers: Crossovers) -> int:
    """Set it for all such layers of `model`, where there is another way; return how many these are."""
    from handlers.cpu_kernels import amx

    alike: dict[str, list[BlockLinear]] = {}
    for module in model.modules():
        if isinstance(module, BlockLinear):
            name = f"{'+'.join(module.formats)} {module.in_features} x {module.out_features}"
            alike.setdefault(name, []).append(module)
    for name, linears in alike.items():
        if amx.IS_USABLE and linears[0].dtype == torch.bfloat16:
            crossover = _crossover(name, linears[: max(1, _READ // linears[0].laid.nbytes)], crossovers)
            for linear in linears:
                linear.laid[EXACT_ROWS] = crossover
    return sum(map(len, alike.values()))


def _crossover(name: str, linears: list[BlockLinear], crossovers: Crossovers) -> int:
    def passes(exact_rows: int) -> Callable[[int], Work]:
        def of(rows: int) -> Work:
            hidden = torch.ones((rows, linears[0].in_features), dtype=torch.bfloat16)
            modules = itertools.cycle(linears)

            def work() -> object:
                linear = next(modules)
                linear.laid[EXACT_ROWS] = exact_rows
                return linear(hidden)

            return work

        return of

    with torch.inference_mode():
        return crossovers.crossover(name, passes(ALL), passes(0))
