"""Devices that this machine does not have: tensors that say they are on `meta:N`, and are computed on the CPU.

An operation whose tensors are on different devices fails, as on a machine with GPUs. So a test on the CPU shows where
a model computes what, and with which result. It cannot show speed, or what only the kernels of a GPU do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_CPU = torch.device("cpu")
_aten = torch.ops.aten
# These take tensors of two devices: copies between them, and rows chosen by indices on the CPU.
_CROSSING = {_aten.copy_, _aten._to_copy}
_INDEXING = {_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_}
# These make tensors of values in Python, by no operation that a mode sees.
_FROM_VALUES = {"tensor": torch.tensor, "as_tensor": torch.as_tensor}
_MATH = 0  # torch's attention of plain operators; the kernels for GPUs are not there


class SimulatedTensor(torch.Tensor):
    """`values`, a tensor of the CPU, as a tensor of `device`."""

    values: torch.Tensor

    @staticmethod
    def __new__(cls, values: torch.Tensor, device: torch.device) -> SimulatedTensor:
        layout = {"strides": values.stride(), "storage_offset": values.storage_offset(), "dtype": values.dtype}
        with torch.inference_mode(mode=False):  # views of caches are written to in inference mode
            return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined,no-any-return]
                cls, values.shape, device=device, **layout
            )

    def __init__(self, values: torch.Tensor, device: torch.device) -> None:
        assert values.device.type == "cpu", "no values"
        self.values = values

    def tolist(self) -> Any:
        return self.values.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class SimulatedDevices(TorchDispatchMode):
    """Makes the tensors of operations that name a `meta` device simulated ones."""

    def __enter__(self) -> SimulatedDevices:
        for name, function in _FROM_VALUES.items():
            setattr(torch, name, _copied_from_cpu(function))
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for name, function in _FROM_VALUES.items():
            setattr(torch, name, function)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _copied_from_cpu(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return `function` such that it builds on the CPU, and copies: torch drops the values of a `meta` tensor."""

    def build(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        if device is None or torch.device(device).type != "meta":
            return function(*args, device=device, **kwargs)
        return function(*args, device="cpu", **kwargs).to(device)

    return build


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Compute `func` on the CPU.

    Each operation of a model comes here, so this walks the arguments itself: torch's pytree takes longer than that.
    """
    tensors: list[torch.Tensor] = []
    named: list[torch.device] = []
    args = [_on_cpu(value, tensors, named) for value in args]
    kwargs = {name: _on_cpu(value, tensors, named) for name, value in kwargs.items()}
    device = named[0] if named else _device(func, tensors)
    if func.overloadpacket is _aten._fused_sdp_choice:
        return _MATH
    out = func(*args, **kwargs)
    if device.type != "meta":
        return out
    changed = {id(leaf.values): leaf for leaf in tensors if isinstance(leaf, SimulatedTensor) and leaf.device == device}
    return _simulated(out, changed, device)


def _on_cpu(value: Any, tensors: list[torch.Tensor], named: list[torch.device]) -> Any:
    """Return an argument as it is computed with; the tensors and the devices in it are added to these lists."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return value.values if isinstance(value, SimulatedTensor) else value
    if isinstance(value, torch.device):
        named.append(value)
        return _CPU
    if isinstance(value, list | tuple):
        return [_on_cpu(part, tensors, named) for part in value]
    return value


def _simulated(value: Any, changed: dict[int, SimulatedTensor], device: torch.device) -> Any:
    """Return a result as tensors of `device`; those that the operation has changed in place stay what they are."""
    if isinstance(value, torch.Tensor):
        same = changed.get(id(value))
        return SimulatedTensor(value, device) if same is None else same
    if isinstance(value, list | tuple):
        return type(value)(_simulated(part, changed, device) for part in value)
    return value


def _device(func: Any, tensors: list[torch.Tensor]) -> torch.device:
    """Return where the result is. Raises AssertionError if the operation mixes devices."""
    if func.overloadpacket in _CROSSING or func.overloadpacket in _INDEXING:
        indices = tensors[1:] if func.overloadpacket in _INDEXING else []
        assert all(leaf.device in (tensors[0].device, _CPU) for leaf in indices), f"{func}: {tensors}"
        return tensors[0].device
    devices = {leaf.device for leaf in tensors if leaf.dim() or leaf.device.type != "cpu"}
    assert len(devices) <= 1, f"{func} mixes {devices}"
    return next(iter(devices), _CPU)
