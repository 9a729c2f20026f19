"""Models in GGUF: weights that transformers unpacks while it loads them, and the tokenizer in the same file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, pre_tokenizers

from lmi_server.configuration.model_directory.gguf import GgufHeader, read_gguf
from lmi_server.configuration.model_directory.gguf_faults import tokenizer_fault
from lmi_server.contract.errors import ConfigurationError, ModelLoadError
from lmi_server.processes import gguf_package

# A model may have so many weights for each of the file, and some more, which transformers makes of others.
_MAX_PER_WEIGHT, _ALLOWED_WEIGHTS = 2, 2**20
_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
_LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def is_gguf(path: str) -> bool:
    """Return whether the path of a model is that of a file in GGUF."""
    return path.endswith(".gguf")


def gguf_arguments(path: str) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` that name the file. Raises ModelLoadError without the package gguf."""
    if find_spec("gguf") is None:
        raise ModelLoadError(f"{path}: a model in GGUF needs the package gguf; install lmi-server[gguf]")
    gguf_package.prepare()
    return {"path": str(Path(path).parent), "gguf_file": Path(path).name}


def gguf_weights(path: str) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` for plain layers, which the rolling batch computes itself."""
    from transformers import GgufConfig

    source = gguf_arguments(path)
    return {**source, "quantization_config": GgufConfig(dequantize=True, gguf_file=source["gguf_file"])}


def refuse_damaged(path: str) -> None:
    """Raise ModelLoadError if the file is cut, or keys and tensors of its header do not make a model.

    transformers would draw layers that are missing at random.
    """
    fault = _header(path).fault(Path(path))
    if fault is not None:
        raise ModelLoadError(f"{path}: {fault}")


def refuse_sizes(config: Any, path: str) -> None:
    """Raise ModelLoadError if the sizes in the header are those of a far larger model; nothing is allocated here."""
    from transformers import AutoModelForCausalLM

    header = _header(path)
    max_weights = _MAX_PER_WEIGHT * header.parameters + _ALLOWED_WEIGHTS
    try:
        experts = int(header.values.get(f"{header.architecture}.expert_count", 0))
        needed = experts * int(config.num_hidden_layers)  # modules that are made one by one
        if needed <= max_weights:
            with torch.device("meta"):
                needed = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(config).parameters())
    except (TypeError, ValueError, RuntimeError, ArithmeticError, LookupError, AssertionError):
        return  # loading the model fails so too, and says for which file
    if needed > max_weights:
        raise ModelLoadError(
            f"{path}: the sizes in the file are those of a model with {needed:,} weights, and it has"
            f" {header.parameters:,}; the file is damaged, fetch it again"
        )


def _header(path: str) -> GgufHeader:
    try:
        return read_gguf(Path(path))
    except ConfigurationError as error:
        raise ModelLoadError(str(error)) from error


def refuse_other_shapes(model: Any, path: str) -> None:
    """Raise ModelLoadError if a weight has not the shape that the sizes in the file give it.

    transformers takes weights from GGUF in any shape, and kernels that compute several layers at once check none.
    """
    with torch.device("meta"):
        expected = type(model)(model.config)
    for name, weight in expected.named_parameters():
        found = model.get_parameter(name).shape
        if found != weight.shape:
            raise ModelLoadError(
                f"{path}: {name} is {tuple(found)}, but the sizes in the file make it {tuple(weight.shape)}; the file"
                " is damaged, fetch it again"
            )


def load_gguf_tokenizer(path: str, load: Callable[..., Any]) -> Any:
    """Return the tokenizer of the files beside the model, or else the one in its file. Raises ModelLoadError."""
    if (Path(path).parent / "tokenizer.json").is_file():
        return load(path=str(Path(path).parent))
    values = _header(path).values
    fault = tokenizer_fault(values)
    if fault is not None:
        raise ModelLoadError(f"{path}: {fault}")
    tokenizer = load(**gguf_arguments(path))
    # transformers reads the tokens and their merges, but not how the model splits a text before it merges.
    if values["tokenizer.ggml.model"] == "gpt2":
        tokenizer.backend_tokenizer.pre_tokenizer = _SPLITS[values["tokenizer.ggml.pre"]]
    return tokenizer


def _regex(pattern: str) -> Any:
    """Return the steps of models that split by their own pattern instead of GPT-2's."""
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


# As in llama.cpp, which gives these names to ways of splitting.
_SPLITS: Mapping[str, Any] = {
    "gpt-2": _BYTES,
    "llama-bpe": _regex(_LLAMA_3),
    "qwen2": _regex(_LLAMA_3.replace("{1,3}", "")),
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _BYTES]),
    "starcoder": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _BYTES]),
}
