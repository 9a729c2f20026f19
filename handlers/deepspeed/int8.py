"""`option.quantize=dynamic_int8` and `smoothquant`: linear layers with weights and activations in 8 bits, on the CPU.

LMI had both from a fork of DeepSpeed that was never published. Here both are W8A8 with a scale per output of the
weights and one per row of the activations, taken when the row comes: what a request computes is its own affair, whoever
shares its batch. SmoothQuant (Xiao et al., 2023) first moves part of the outliers of the activations into the weights,
by a factor per input; it is measured on a few sentences, and applied to the row where it is quantised.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from handlers.deepspeed.options import DeepSpeedOptions
from lmi_server.contract.errors import ModelLoadError

_ALPHA = 0.5  # SmoothQuant's own choice
_LEAST = 1e-5
# Texts of several kinds, to see which inputs of a layer have outliers: they are always the same few.
_SENTENCES = (
    "The committee will publish its report on the harbour's new cranes before the end of March.",
    "def area(radius):\n    return 3.14159 * radius ** 2\n\nprint(area(2.5))",
    "Q: Which planet is closest to the sun?\nA: Mercury, which takes 88 days to go round it once.",
    "Dear Anna, thank you for the two jars of plum jam; the children have finished the first one already!",
    "In 1867 the company sold 4,312 tons of iron at 7.25 pounds each, 12% less than in the year before.",
    '{"name": "kettle", "price": 29.9, "colours": ["red", "white"], "in_stock": true}',
    "Die Straßenbahn fährt sonntags erst um halb neun. Le dernier train part à minuit.",
    "She opened the door, looked down the empty corridor, and wondered who had called her name.",
)


def quantize(model: Any, tokenizer: Any, options: DeepSpeedOptions) -> dict[str, Any]:
    """Quantise the linear layers of `model` in place; return what the log says of it, nothing where none was asked for.

    All ranks of a group call it. Raises ModelLoadError where the device or the model cannot be.
    """
    if options.quantize is None:
        return {}
    before = model_bytes(model)
    smoothing: Mapping[str, torch.Tensor] = {}
    check_device(model.device)
    if options.quantize == "smoothquant":
        alpha = _ALPHA if options.smoothquant_alpha is None else options.smoothquant_alpha
        smoothing = _smoothing(model, _largest_inputs(model, tokenizer), alpha)
    for name, linear in list(_linears(model)):
        _replace(model, name, DynamicInt8Linear.quantized(linear, smoothing.get(name)))
    return {
        "quantization": options.quantize,
        "weights_mib": round(model_bytes(model) / 2**20, 1),
        "unquantized_weights_mib": round(before / 2**20, 1),
    }


def make_places(model: nn.Module, smoothed: Collection[str]) -> None:
    """Put empty 8-bit layers into `model`, for weights that were quantised before, those of `smoothed` with factors."""
    for name, linear in list(_linears(model)):
        _replace(model, name, DynamicInt8Linear.empty(linear, name in smoothed))


def check_device(device: torch.device) -> None:
    """Raise ModelLoadError where there are no 8-bit products."""
    if device.type != "cpu":
        raise ModelLoadError(
            f"option.quantize=dynamic_int8 and smoothquant run on the CPU, not on {device.type}; for 8-bit weights"
            " there use option.entryPoint=djl_python.huggingface with option.quantize=bitsandbytes8"
        )


def model_bytes(model: nn.Module) -> int:
    """Return the bytes of weights and buffers."""
    return sum(tensor.nelement() * tensor.element_size() for tensor in (*model.parameters(), *model.buffers()))


class DynamicInt8Linear(nn.Module):
    """A linear layer whose weights are 8-bit numbers, and whose rows are made such when they come.

    weight (out, in) int8, scales (out,) float32, smoothing (in,) float32 or None: the row is divided by it.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        scales: torch.Tensor,
        smoothing: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.register_buffer("weight", weight)
        self.register_buffer("scales", scales)
        self.register_buffer("smoothing", smoothing)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    @classmethod
    def quantized(cls, linear: nn.Linear, smoothing: torch.Tensor | None) -> DynamicInt8Linear:
        """Return the 8-bit layer in the place of `linear`."""
        weight = linear.weight.detach().float()
        if smoothing is not None:
            weight = weight * smoothing
        scales = _scales(weight)
        return cls(_rounded(weight, scales), scales[:, 0], smoothing, linear.bias)

    @classmethod
    def empty(cls, linear: nn.Linear, smooth: bool) -> DynamicInt8Linear:
        """Return an 8-bit layer of the shape of `linear`, whose weights are still to come."""
        rows, columns = linear.weight.shape
        smoothing = torch.empty(columns) if smooth else None
        return cls(torch.empty((rows, columns), dtype=torch.int8), torch.empty(rows), smoothing, linear.bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(..., in_features) -> (..., out_features)."""
        rows = hidden.flatten(0, -2).float()
        if self.smoothing is not None:
            rows = rows / self.smoothing
        scales = _scales(rows)
        products = torch._int_mm(_rounded(rows, scales), self.weight.t())
        out = products.float().mul_(scales).mul_(self.scales).to(hidden.dtype)
        if self.bias is not None:
            out += self.bias
        return out.view(*hidden.shape[:-1], self.out_features)


def _scales(rows: torch.Tensor) -> torch.Tensor:
    """(rows, width) -> (rows, 1): what a unit of each row's 8-bit numbers stands for."""
    if not rows.shape[1]:  # a rank's part of a layer may be empty
        return rows.new_ones((rows.shape[0], 1))
    return rows.abs().amax(dim=1, keepdim=True).clamp_(min=_LEAST).div_(127)


def _rounded(rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return (rows / scales).round_().to(torch.int8)


def _linears(model: Any) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the layers to quantise by name: not the last one, whose errors are those of the logits themselves."""
    last = model.get_output_embeddings()
    kept = set() if last is None else set(last.modules())
    for name, module in model.named_modules():
        if type(module) is nn.Linear and module not in kept:
            yield name, module


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    owner, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(owner), attribute, module)


def _largest_inputs(model: Any, tokenizer: Any) -> dict[str, torch.Tensor]:
    """Return the largest magnitude that each input of each layer takes over the sentences."""
    if tokenizer is None:
        raise ModelLoadError(
            "option.quantize=smoothquant measures a model on sentences, and this one reads none; use dynamic_int8"
        )
    largest: dict[str, torch.Tensor] = {}

    def watch(name: str) -> Any:
        def hook(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            peak = inputs[0].detach().float().flatten(0, -2).abs().amax(dim=0)
            largest[name] = torch.maximum(largest.get(name, peak), peak)

        return hook

    hooks = [linear.register_forward_pre_hook(watch(name)) for name, linear in _linears(model)]
    try:
        for sentence in _SENTENCES:
            _run(model, tokenizer(sentence, return_tensors="pt")["input_ids"])
    finally:
        for hook in hooks:
            hook.remove()
    return largest


@torch.inference_mode()  # type: ignore[untyped-decorator]
def _run(model: Any, ids: torch.Tensor) -> None:
    more = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    model(input_ids=ids, **more)


def _smoothing(model: Any, largest: Mapping[str, torch.Tensor], alpha: float) -> dict[str, torch.Tensor]:
    """Return the factor per input of each layer: activations ** alpha over weights ** (1 - alpha), as published."""
    factors = {}
    for name, linear in _linears(model):
        if name in largest and linear.weight.shape[0]:  # the others saw no sentence
            weights = linear.weight.detach().float().abs().amax(dim=0).clamp_(min=_LEAST)
            factors[name] = (largest[name].clamp(min=_LEAST) ** alpha / weights ** (1 - alpha)).clamp_(min=_LEAST)
    return factors
