"""Small models as gptq and awq pack them, and in 8-bit floats, written here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny_models import byte_tokenizer, llama_of_whole_blocks

_AWQ = (0, 2, 4, 6, 1, 3, 5, 7)  # the number at each place of a word


def packed_llama(
    directory: Path,
    method: str = "gptq",
    bits: int = 4,
    group: int = 32,
    symmetric: bool = False,
    act_order: bool = False,
    form: str = "gptq",
    biased: bool = False,
) -> Any:
    """Write a small Llama whose layers are packed; return the model with the weights that they stand for, float32."""
    model = llama_of_whole_blocks()
    model.config.attention_bias = model.config.mlp_bias = biased
    chance = torch.Generator().manual_seed(5)
    tensors: dict[str, torch.Tensor] = {}
    for name, linear in list(model.model.layers.named_modules(prefix="model.layers")):
        if isinstance(linear, torch.nn.Linear):
            parts, weight = packed(linear, method, bits, group, symmetric, act_order, form, chance)
            tensors |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
            linear.weight.data = weight
            if biased:
                linear.bias = torch.nn.Parameter(torch.randn(len(weight), generator=chance))
                tensors[f"{name}.bias"] = linear.bias.data
    plain = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("model.layers")}
    norms = {name: tensor for name, tensor in model.state_dict().items() if "norm" in name}
    model.config.quantization_config = {
        "quant_method": method, "bits": bits, "group_size": group, "desc_act": act_order, "sym": symmetric,
        **({"version": "gemm", "zero_point": True} if method == "awq" else {"checkpoint_format": form}),
    }  # fmt: skip
    directory.mkdir(exist_ok=True)
    save_file(
        {name: tensor.contiguous().clone() for name, tensor in (plain | norms | tensors).items()},
        directory / "model.safetensors",
        {"format": "pt"},
    )
    (directory / "config.json").write_text(json.dumps(model.config.to_dict()))
    del model.config.quantization_config
    byte_tokenizer().save_pretrained(directory)
    return model


def float_llama(directory: Path, form: str, size: int = 32) -> Any:
    """Write a small Llama in 8-bit floats; return the model with the weights that they stand for, float32.

    `form`: scales of blocks as DeepSeek has them, or of layers or outputs as compressed-tensors does.
    """
    model = llama_of_whole_blocks()
    tensors = dict(model.state_dict())
    for name, linear in list(model.model.layers.named_modules(prefix="model.layers")):
        if not isinstance(linear, torch.nn.Linear):
            continue
        outputs, inputs = linear.weight.shape
        numbers = (linear.weight.data * 1000).clamp(-448, 448).to(torch.float8_e4m3fn)
        height, width = {"blocks": (size, size), "outputs": (1, inputs), "layer": (outputs, inputs)}[form]
        scales = torch.rand(outputs // height, inputs // width) / 500 + 1e-3
        by_number = scales.repeat_interleave(height, 0).repeat_interleave(width, 1)
        linear.weight.data = numbers.float() * by_number
        tensors[f"{name}.weight"] = numbers
        if form == "layer":
            scales = scales[0]
            tensors[f"{name}.input_scale"] = torch.ones(1)
        tensors[f"{name}.weight_scale_inv" if form == "blocks" else f"{name}.weight_scale"] = scales
    model.config.quantization_config = (
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [size, size], "activation_scheme": "dynamic"}
        if form == "blocks"
        else {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float"},
                        "input_activations": {"num_bits": 8, "type": "float", "dynamic": True}}}}
    )  # fmt: skip
    save_file({name: part.contiguous().clone() for name, part in tensors.items()}, directory / "model.safetensors",
              {"format": "pt"})  # fmt: skip
    (directory / "config.json").write_text(json.dumps(model.config.to_dict()))
    del model.config.quantization_config
    byte_tokenizer().save_pretrained(directory)
    return model


def packed(
    linear: Any,
    method: str,
    bits: int,
    group: int,
    symmetric: bool,
    act_order: bool,
    form: str,
    chance: torch.Generator,
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return the tensors of a layer of random weights, and its weights (out, in) float32."""
    outputs, inputs = linear.weight.shape
    groups = 1 if group == -1 else inputs // group
    of_inputs = torch.arange(inputs) // (inputs // groups)
    if act_order:
        of_inputs = of_inputs[torch.randperm(inputs, generator=chance)]
    numbers = torch.randint(1 << bits, (inputs, outputs), generator=chance)
    zeros = torch.randint(1, 1 << bits, (groups, outputs), generator=chance)
    if symmetric:
        zeros = torch.full_like(zeros, 1 << (bits - 1))
    scales = ((torch.rand((groups, outputs), generator=chance) + 0.5) * (1.2 / (1 << bits))).half()
    weight = (numbers - zeros[of_inputs]).float() * scales[of_inputs].float()
    stored_zeros = zeros - 1 if method == "gptq" and form == "gptq" else zeros
    if method == "awq":
        parts = {"qweight": _words(_shuffled(numbers), bits), "qzeros": _words(_shuffled(zeros), bits)}
    else:
        parts = {"qweight": _words(numbers.T, bits).T, "qzeros": _words(stored_zeros, bits), "g_idx": of_inputs.int()}
    return {**parts, "scales": scales}, weight.T.contiguous()


def _shuffled(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.unflatten(1, (-1, 8))[:, :, list(_AWQ)].flatten(1)


def _words(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """(rows, n) -> (rows, n * bits / 32) int32, the lowest bits first."""
    stream = (numbers[:, :, None] >> torch.arange(bits) & 1).flatten(1)
    words = (stream.unflatten(1, (-1, 32)) << torch.arange(32)).sum(2)
    return torch.where(words >= 2**31, words - 2**32, words).int()
