"""Which linear layers a LoRA adapter changes, by names and shapes of its weights, and whether a model has them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from lmi_server.contract.errors import RequestError

PREFIX = "base_model.model."
DOWN, UP = ".lora_A.weight", ".lora_B.weight"
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")


class Widths(NamedTuple):
    """The widths of the input and the output of a linear layer."""

    inputs: int
    outputs: int


def is_conv1d(module: nn.Module) -> bool:
    """Tell whether a module is GPT-2's linear layer, whose weight is transposed."""
    return type(module).__name__ == "Conv1D"


def module_widths(module: Any) -> Widths:
    """Return the widths of a linear layer."""
    return Widths(*module.weight.shape) if is_conv1d(module) else Widths(module.in_features, module.out_features)


def adapted_layers(shapes: Mapping[str, Sequence[int]]) -> dict[str, Widths]:
    """Return the layers that an adapter changes, by their names in the model; `shapes` are those of its weights.

    Raises RequestError for a matrix without its other half, and for two that do not fit together.
    """
    halves: dict[str, dict[str, Sequence[int]]] = defaultdict(dict)
    for name, shape in shapes.items():
        kind = DOWN if name.endswith(DOWN) else UP
        halves[name.removeprefix(PREFIX).removesuffix(kind)][kind] = shape
    return {layer: _widths(layer, both) for layer, both in halves.items()}


def _widths(layer: str, halves: Mapping[str, Sequence[int]]) -> Widths:
    down, up = halves.get(DOWN), halves.get(UP)
    if down is None or up is None:
        raise RequestError(
            f"the adapter holds {layer}{UP if down is None else DOWN} without its other half; save it again with peft"
        )
    if len(down) != 2 or len(up) != 2 or down[0] != up[1]:
        raise RequestError(
            f"the adapter's weights of {layer} have the shapes {list(down)} and {list(up)}, which do not fit together;"
            " save it again with peft"
        )
    return Widths(down[1], up[0])


def refuse_foreign(adapter: Mapping[str, Widths], model: Mapping[str, Widths]) -> None:
    """Raise RequestError, naming the layer, if an adapter changes one that the model lacks or has in other widths."""
    for layer, given in adapter.items():
        own = model.get(layer)
        if own is None:
            raise RequestError(
                f"the adapter changes {layer}, which is no linear layer of this model; use an adapter of this model"
            )
        if given != own:
            raise RequestError(
                f"the adapter's {layer} has {given.inputs} inputs and {given.outputs} outputs, but this model's has"
                f" {own.inputs} and {own.outputs}; use an adapter of this model"
            )


def refuse_infinite(name: str, weights: torch.Tensor, dtype: torch.dtype, scaling: float = 1.0) -> None:
    """Raise RequestError, naming the tensor, if it has NaN or infinity, or overflows in `dtype` once it is scaled.

    One such number makes every output of the layer NaN.
    """
    if not bool(weights.isfinite().all()):
        raise RequestError(f"the adapter's {name} holds NaN or infinity; train it again, or save it from a sound state")
    if not bool((weights.float() * scaling).to(dtype).isfinite().all()):
        raise RequestError(
            f"the adapter's {name} holds numbers that overflow in {str(dtype).removeprefix('torch.')}"
            f" (scaled by {scaling:g}); set option.dtype=fp32, or use another adapter"
        )


class AdapterCheck:
    """Checks adapters of an engine that itself takes any shapes and numbers, from their files.

    `config` is transformers' configuration of the model, `dtype` the data type that it is served in. Of a model that is
    not a causal language model of transformers the layers are not known, and only the adapter itself is checked.
    """

    def __init__(self, config: Any, dtype: torch.dtype) -> None:
        self._config = config
        self._dtype = dtype

    def __call__(self, directory: str) -> None:
        """Raise RequestError if the adapter in `directory` does not fit the model, or is not finite."""
        shapes: dict[str, Sequence[int]] = {}
        for name, weights in _tensors(Path(directory)):
            refuse_infinite(name, weights, self._dtype)
            # Experts' layers have other names in engines.
            if name.startswith(PREFIX) and name.endswith((DOWN, UP)) and ".experts" not in name:
                shapes[name] = weights.shape
        layers = adapted_layers(shapes)
        if layers and self._layers is not None:
            refuse_foreign(layers, self._layers)

    @cached_property
    def _layers(self) -> Mapping[str, Widths] | None:
        if type(self._config) not in MODEL_FOR_CAUSAL_LM_MAPPING or self._config.get_text_config() is not self._config:
            return None
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(self._config)
        linear = ((name, module) for name, module in model.named_modules() if _is_linear(module))
        return {name: module_widths(module) for name, module in linear}


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or is_conv1d(module)


def _tensors(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of an adapter, one at a time if its file allows that."""
    file = next((directory / name for name in _WEIGHTS if (directory / name).is_file()), None)
    if file is None:
        return
    try:
        if file.suffix == ".bin":
            yield from torch.load(file, map_location="cpu", weights_only=True).items()
            return
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 - it is no mapping
                yield name, weights.get_tensor(name)
    except (SafetensorError, UnpicklingError, RuntimeError, EOFError) as error:
        raise RequestError(f"{file} cannot be read: {error}; save the adapter again with peft") from error
