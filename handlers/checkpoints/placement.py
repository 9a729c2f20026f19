"""Where the layers of a model are: on one device, or spread over several by accelerate.

accelerate puts a hook on each layer, which moves the inputs of the layer to the device of its weights. A layer that is
mapped to "cpu" beside GPUs, or to "disk", is computed on the main device, and its weights are read for each pass.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from lmi_server.contract.errors import ModelLoadError

logger = logging.getLogger(__name__)

_STORES = ("cpu", "disk")  # they keep weights; "cpu" computes, too, if there is nothing else
# Weights take at most this share of the free memory of a GPU. The rest is for the KV cache and for activations, which
# accelerate does not count.
_WEIGHTS_SHARE = 0.8


def memory_limits(free: Sequence[int], main_memory: int) -> dict[int | str, int]:
    """Return transformers' `max_memory`: the bytes of weights on each device of a worker, and in main memory.

    `free` has the free bytes of each GPU. Nothing but the weights of layers that fit on no GPU goes to main memory.
    """
    return {**{gpu: int(size * _WEIGHTS_SHARE) for gpu, size in enumerate(free)}, "cpu": main_memory}


def is_spread(model: Any) -> bool:
    """Return whether hooks of accelerate move activations between devices, or weights to them."""
    devices = set(_device_map(model).values())
    return len(devices) > 1 or "disk" in devices


def refuse_divided_layers(model: Any, device_map: Any) -> None:
    """Refuse a model whose layers accelerate may have divided, so that it fails where a layer adds its input.

    accelerate keeps only those modules whole which the class of a model names; a map of the user's own is the user's.
    Raises ModelLoadError.
    """
    if is_spread(model) and isinstance(device_map, str) and not getattr(model, "_no_split_modules", None):
        raise ModelLoadError(
            f"option.device_map={device_map}: {type(model).__name__} does not say which of its modules have to stay"
            " whole, so that several devices could not compute it; set option.device_map=cuda:0, or name the device of"
            " each layer in JSON"
        )


def main_device(model: Any) -> torch.device:
    """Return the device on which a model takes its inputs and gives its outputs."""
    if not is_spread(model):
        return model.device
    devices = [device for device in _device_map(model).values() if device not in _STORES]
    return torch.device(devices[0] if devices else "cpu")


def module_device(module: nn.Module, otherwise: torch.device) -> torch.device:
    """Return the device to which accelerate has a module compute; `otherwise` if accelerate has not placed it."""
    device = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
    return otherwise if device is None else torch.device(device)


def placement_details(model: Any) -> dict[str, Any]:
    """Return how many modules of the map each device has, for the log; nothing if the model is on one device."""
    if not is_spread(model):
        return {}
    counts = Counter(str(device) for device in _device_map(model).values())
    stored = [device for device in _STORES if device in counts and str(main_device(model)) != device]
    if stored:
        logger.warning(
            "%d of %d modules are on %s and read for each pass, which is slow; raise option.tensor_parallel_degree",
            sum(counts[device] for device in stored), sum(counts.values()), " and ".join(stored),
        )  # fmt: skip
    return {"device_map": dict(counts)}


def _device_map(model: Any) -> dict[str, Any]:
    found: dict[str, Any] = getattr(model, "hf_device_map", None) or {}
    return found
