"""The scan of Mamba's first version, continued from a state.

Its code in transformers, which Falcon Mamba, Jamba and Zamba share, begins every scan of more than one token at zero,
because a library of kernels does. The recurrence is linear in its state: the share of an initial state in outputs and
final state is this state, decayed up to each token.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

_SCAN = "mamba_selective_scan"


class ContinuedScan:
    """The forward method of one mixer, `forward`, whose scan begins at the state that `begin` gets."""

    def __init__(self, module: Any, method: types.FunctionType) -> None:
        self._scan: Callable[..., Any] = method.__globals__[_SCAN]
        self._states: list[torch.Tensor] = []
        own = types.FunctionType(
            method.__code__,
            {**method.__globals__, _SCAN: self._continued},
            method.__name__,
            method.__defaults__,
            method.__closure__,
        )
        own.__kwdefaults__ = method.__kwdefaults__
        self.forward = types.MethodType(own, module)

    def begin(self, state: torch.Tensor | None) -> None:
        """Set the state of the next scans: (sequences, channels, states), or with heads, which are scanned in turn."""
        if state is None:
            self._states = []
        else:
            self._states = [state] if state.dim() == 3 else list(state.unbind(1))

    def _continued(
        self,
        hidden: torch.Tensor,
        dt: torch.Tensor,
        decay: torch.Tensor,
        into: torch.Tensor,
        out_of: torch.Tensor,
        **more: Any,
    ) -> Any:
        """Compute the scan with the arguments of transformers' function: `decay` and the two behind it are A, B, C."""
        found = self._scan(hidden, dt, decay, into, out_of, **more)
        if not self._states:
            return found
        out, last = found
        state = self._states.pop(0)
        bias, gate = more.get("delta_bias"), more.get("z")
        step = dt if bias is None else dt + bias.to(dt.dtype)[..., None]
        step = functional.softplus(step) if more.get("delta_softplus") else step
        carried = torch.exp(decay[None, :, None] * step.cumsum(-1)[..., None]) * state[:, :, None]
        added = torch.einsum("bdtn,bnt->bdt", carried, out_of.float())
        added = added if gate is None else added * functional.silu(gate)
        return out + added.to(out.dtype), last + carried[:, :, -1].to(last.dtype)


def with_continued_scan(module: Any) -> ContinuedScan | None:
    """Return the module's forward method with a scan that continues; None if it has another kind of scan."""
    method = inspect.unwrap(type(module).forward)
    if not isinstance(method, types.FunctionType) or _SCAN not in method.__code__.co_names:
        return None
    return ContinuedScan(module, method)
