"""Linear layers with 8-bit weights and activations (W8A8): `option.quantize=dynamic_int8` or `smoothquant`.

LMI has both methods from a fork of DeepSpeed that was never published; DeepSpeed itself has 8 bits only in its kernels
for GPUs. This is an implementation of its own, on torch's integer matrix product:

    weight (out, in) float    ->  int8 values, one scale per output  (at load)
    row (in,) float           ->  int8 values, one scale per row     (at each forward pass: "dynamic")
    output                     =  (int8 row @ int8 weight, in int32) * scale of the row * scale of the output

A scale is the largest magnitude divided by 127. The scale of a row depends on the row alone, never on its batch: so the
tokens of a request do not depend on its neighbours.

An outlier in a row makes its scale coarse for all other values. In language models outliers always occur in the same
few inputs of a layer. SmoothQuant (Xiao et al., 2023, https://arxiv.org/abs/2211.10438) therefore divides each input by
a factor and multiplies the matching column of the weights by it, which leaves the product unchanged: with

    factor[j] = max |activation[j]| ** alpha / max |weight[:, j]| ** (1 - alpha)

part of the range moves from the activations (hard to quantise) to the weights (easy). The maxima of
the activations are measured on a few sentences while the model loads. The paper folds the factors into the layer
before; here `forward` divides the row by them, because that layer need not be a linear one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from handlers.checkpoints.quantization import weight_details
from handlers.deepspeed.options import DeepSpeedOptions
from handlers.ranks.sharding import local_bytes
from handlers.torch_operators import probes
from lmi_server.contract.errors import ModelLoadError

_ALPHA = 0.5  # the paper's default
_GPU_WIDTH, _GPU_ROWS = 8, 32
_MIN_SCALE = 1e-5  # a row of zeros has no magnitude to divide by
# Texts of several kinds (prose, code, questions, numbers, JSON, languages), to find the inputs that have outliers.
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
    """Quantise the linear layers of `model` in place as option.quantize says; return details for the log.

    The result is empty if the option is not set. On several ranks every rank must call it, because SmoothQuant runs the
    model. Raises ModelLoadError if SmoothQuant has no tokenizer for its sentences.
    """
    if options.quantize is None:
        return {}
    before = sum(local_bytes(model).values())
    smoothing: Mapping[str, torch.Tensor] = {}
    if options.quantize == "smoothquant":
        alpha = _ALPHA if options.smoothquant_alpha is None else options.smoothquant_alpha
        smoothing = _smoothing_factors(model, _largest_inputs(model, tokenizer), alpha)
    for name, linear in list(_linears(model)):
        _replace(model, name, DynamicInt8Linear.quantize(linear, smoothing.get(name)))
    return weight_details(options.quantize, sum(local_bytes(model).values()), before)


def insert_empty_layers(model: nn.Module, smoothed: Collection[str]) -> None:
    """Replace linear layers of `model` by empty 8-bit ones, to be filled with weights that were quantised before.

    `smoothed` are the names of the layers that have SmoothQuant's factors.
    """
    for name, linear in list(_linears(model)):
        _replace(model, name, DynamicInt8Linear.empty(linear, name in smoothed))


class DynamicInt8Linear(nn.Module):
    """A linear layer with 8-bit weights, which quantises its input row by row in `forward`.

    `weight` is (out, in) int8, `scales` (out,) float32. `smoothing` is (in,) float32, by which `forward` divides each
    row, or None. Buffers, not parameters: int8 has no gradients, and buffers are saved and loaded, too.
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
    def quantize(cls, linear: nn.Linear, smoothing: torch.Tensor | None) -> DynamicInt8Linear:
        """Return the 8-bit form of `linear`, with SmoothQuant's factors (in,) if there are any."""
        weight = linear.weight.detach().float()
        if smoothing is not None:
            weight = weight * smoothing
        scales = _scales(weight)
        return cls(_round(weight, scales), scales[:, 0], smoothing, linear.bias)

    @classmethod
    def empty(cls, linear: nn.Linear, smooth: bool) -> DynamicInt8Linear:
        """Return an 8-bit layer of the shape of `linear`, whose weights are loaded later."""
        rows, columns = linear.weight.shape
        smoothing = torch.empty(columns) if smooth else None
        return cls(torch.empty((rows, columns), dtype=torch.int8), torch.empty(rows), smoothing, linear.bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(..., in_features) -> (..., out_features)."""
        rows = hidden.flatten(0, -2).float()
        if self.smoothing is not None:
            rows = rows / self.smoothing
        scales = _scales(rows)
        multiply = _product if hidden.device.type == "cpu" else product_of_blocks
        products = multiply(_round(rows, scales), self.weight)
        out = products.float().mul_(scales).mul_(self.scales).to(hidden.dtype)
        if self.bias is not None:
            out += self.bias
        return out.view(*hidden.shape[:-1], self.out_features)


def _product(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """(n, in) int8 by (out, in) int8 -> (n, out) int32: exact for up to 133,000 inputs, 2 ** 31 / 127 ** 2."""
    if rows.device.type == "cpu" and not probes.multiplies_integers():
        return (rows.double() @ weight.double().t()).to(torch.int32)
    return torch._int_mm(rows, weight.t())


def product_of_blocks(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the same for a GPU, whose library multiplies more than 16 rows, and widths that are multiples of 8."""
    count, outputs = len(rows), len(weight)
    if rows.shape[1] % _GPU_WIDTH or outputs % _GPU_WIDTH:  # rare, and slow: the weights are copied
        inputs = (0, -rows.shape[1] % _GPU_WIDTH)
        rows = nn.functional.pad(rows, inputs)
        weight = nn.functional.pad(weight, (*inputs, 0, -outputs % _GPU_WIDTH))
    if count < _GPU_ROWS:
        rows = nn.functional.pad(rows, (0, 0, 0, _GPU_ROWS - count))
    return _product(rows, weight)[:count, :outputs]


def _scales(rows: torch.Tensor) -> torch.Tensor:
    """(rows, width) -> (rows, 1): the value that 1 stands for in each row's 8-bit numbers."""
    if not rows.shape[1]:  # a rank's part of a layer may be empty
        return rows.new_ones((rows.shape[0], 1))
    return rows.abs().amax(dim=1, keepdim=True).clamp_(min=_MIN_SCALE).div_(127)


def _round(rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return (rows / scales).round_().to(torch.int8)


def _linears(model: Any) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the names and the layers to quantise: all linear layers but the last.

    An error of the last layer is an error of the logits, and no later layer evens it out.
    """
    last = model.get_output_embeddings()
    kept = set() if last is None else set(last.modules())
    for name, module in model.named_modules():
        if type(module) is nn.Linear and module not in kept:
            yield name, module


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    owner, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(owner), attribute, module)


def _largest_inputs(model: Any, tokenizer: Any) -> dict[str, torch.Tensor]:
    """Return the largest magnitude of each input over the sentences: for each layer's name a tensor (in,)."""
    if tokenizer is None:
        raise ModelLoadError(
            "option.quantize=smoothquant measures the model on sentences, but it has no tokenizer; set"
            " option.quantize=dynamic_int8"
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
            _run(model, tokenizer(sentence, return_tensors="pt")["input_ids"].to(model.device))
    finally:
        for hook in hooks:
            hook.remove()
    return largest


@torch.inference_mode()  # type: ignore[untyped-decorator]
def _run(model: Any, ids: torch.Tensor) -> None:
    more = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    model(input_ids=ids, **more)


def _smoothing_factors(model: Any, largest: Mapping[str, torch.Tensor], alpha: float) -> dict[str, torch.Tensor]:
    """Return SmoothQuant's factors (in,) by name of the layer; see the formula above."""
    factors = {}
    for name, linear in _linears(model):
        if name in largest and linear.weight.shape[0]:  # the others did not run, or are empty
            weights = linear.weight.detach().float().abs().amax(dim=0).clamp_(min=_MIN_SCALE)
            factors[name] = (largest[name].clamp(min=_MIN_SCALE) ** alpha / weights ** (1 - alpha)).clamp_(
                min=_MIN_SCALE
            )
    return factors
