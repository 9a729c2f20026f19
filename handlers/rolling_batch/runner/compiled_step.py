"""The decode step as one function that torch.compile compiles (`option.enable_torch_compile`).

The code is compiled for any number of rows and columns, and once more for a single row, which torch treats as a case of
its own. If it cannot be compiled, or fails later, the step runs eagerly from then on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from handlers.rolling_batch.attention.decode_passes import COMPILE_KEY, Step, log_no_effect
from lmi_server.contract.errors import first_line

Compile = Callable[[Step], Any]


def torch_compile(step: Step) -> Any:
    """Compile `step` whole: one that parts into several pieces would pay for Python between them in every layer."""
    return torch.compile(step.__call__, fullgraph=True, dynamic=True)


class CompiledStep:
    """A decode step that `compiler` has compiled."""

    def __init__(self, step: Step, compiler: Compile = torch_compile) -> None:
        self._eager = step
        self._run = compiler(step)

    @property
    def is_eager(self) -> bool:
        """Whether the compiled code has failed."""
        return self._run is self._eager

    def __call__(
        self, ids: torch.Tensor, places: torch.Tensor, slots: torch.Tensor, columns: int, *more: torch.Tensor
    ) -> torch.Tensor:
        try:
            logits: torch.Tensor = self._run(ids, places, slots, columns, *more)
        # Of the compiler, and of compiled code whose inputs are not what it was compiled for. A lack of memory and a
        # failing device are neither.
        except (torch._dynamo.exc.TorchDynamoException, AssertionError) as error:
            log_no_effect(COMPILE_KEY, first_line(error))
            self._run = self._eager
            return self._eager(ids, places, slots, columns, *more)
        return logits
