"""What a header of GGUF lacks or contradicts, by which the load would fail, or the model would compute nonsense."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from lmi_server.contract.texts.quoting import excerpt

Shapes = Mapping[str, Sequence[int]]
"""The sizes of tensors by name, as ggml has them: the inputs of a layer first."""

TOKENIZERS = ("gemma4", "gpt2", "llama", "t5")
"""The kinds of tokenizers that are made of the tokens in a file."""
SPLITS = ("gpt-2", "llama-bpe", "qwen2", "smollm", "starcoder")
"""The names of ways to split a text, before the tokenizer `gpt2` merges."""

_ORDERED_TOKENS = ("gemma", "gemma2", "gemma3")
"""Architectures whose files list tokens of the kind `llama` in the order in which they merge."""

_AGAIN = "the file is damaged, fetch it again"
_BESIDE = "put the tokenizer.json of the original model beside the file"
_SIZES = ("block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count")
_OUTER = ("token_embd.weight", "output_norm.weight")
# Of every layer, with what takes the place of a tensor in models with experts, or with fused weights.
_OF_LAYERS = (
    ("attn_norm.weight",),
    ("attn_q.weight", "attn_qkv.weight"),
    ("attn_k.weight", "attn_qkv.weight"),
    ("attn_v.weight", "attn_qkv.weight"),
    ("attn_output.weight",),
    ("ffn_up.weight", "ffn_up_exps.weight"),
    ("ffn_down.weight", "ffn_down_exps.weight"),
)
_NO_GATE = ("gpt2", "phi3", "starcoder2")
_NO_NORM = ("stablelm",)  # some of its models norm once for attention and MLP
_MORE = {
    "gemma2": ("post_attention_norm.weight", "post_ffw_norm.weight"),
    "qwen2moe": ("ffn_gate_inp.weight",),
    "qwen3": ("attn_q_norm.weight", "attn_k_norm.weight"),
    "qwen3moe": ("attn_q_norm.weight", "attn_k_norm.weight", "ffn_gate_inp.weight"),
}
# By the name of a tensor, in a layer or outside: which of its sizes is which size of the model.
_SIZE_OF = {
    **{
        f"{name}.weight": (0, "embedding_length")
        for name in (
            *("token_embd", "output", "output_norm", "attn_norm", "ffn_norm", "attn_q", "attn_k", "attn_v"),
            *("attn_qkv", "ffn_up", "ffn_gate", "ffn_up_exps", "ffn_gate_exps"),
        )
    },
    "attn_output.weight": (1, "embedding_length"),
    "ffn_down_exps.weight": (1, "embedding_length"),
    "ffn_down.weight": (0, "feed_forward_length"),
}


def header_fault(architecture: str, values: Mapping[str, Any], shapes: Shapes) -> str | None:
    """Return which key or tensor is missing or wrong, and what helps; None if none is."""
    layers: dict[str, list[str]] = defaultdict(list)  # names of tensors by the number of the layer
    for name in shapes:
        outer, _, rest = name.partition(".")
        number, _, inner = rest.partition(".")
        if outer == "blk":
            layers[number].append(inner)
    return next(
        chain(
            _wrong_keys(architecture, values, len(layers)),
            _missing_tensors(architecture, shapes, layers),
            _wrong_shapes(architecture, values, shapes),
        ),
        None,
    )


def tokenizer_fault(values: Mapping[str, Any]) -> str | None:
    """Return why no tokenizer can be made of what the file has; None if one can."""
    kind, split = str(values.get("tokenizer.ggml.model", "")), str(values.get("tokenizer.ggml.pre", ""))
    if kind not in TOKENIZERS:
        allowed = ", ".join(TOKENIZERS)
        return f"tokenizer.ggml.model = {excerpt(kind)} is not read from GGUF; allowed: {allowed}; or {_BESIDE}"
    if not values.get("tokenizer.ggml.tokens"):
        return f"has no tokenizer.ggml.tokens; {_BESIDE}"
    if kind == "gpt2" and split not in SPLITS:
        return f"tokenizer.ggml.pre = {excerpt(split)} is not known; {_BESIDE}"
    return _order_fault(kind, values)


def _order_fault(kind: str, values: Mapping[str, Any]) -> str | None:
    """Return why the file does not say which tokens a text is divided into first; None if it says so."""
    is_unigram = kind == "t5"
    if kind == "llama" and values.get("general.architecture") in _ORDERED_TOKENS:
        return None
    if not is_unigram and "tokenizer.ggml.merges" in values:
        return None
    tokens, scores = values["tokenizer.ggml.tokens"], values.get("tokenizer.ggml.scores")
    if scores is None:
        return f"has no {'' if is_unigram else 'tokenizer.ggml.merges and no '}tokenizer.ggml.scores; {_BESIDE}"
    if scores != tokens:
        numbers = f"{excerpt(str(tokens))} tokenizer.ggml.tokens and {excerpt(str(scores))} tokenizer.ggml.scores"
        return f"has {numbers}; {_BESIDE}"
    return None


def _wrong_keys(architecture: str, values: Mapping[str, Any], layers: int) -> Iterator[str]:
    for name in _SIZES:
        key = f"{architecture}.{name}"
        if key not in values:
            yield f"has no key {key}, without which the model cannot be made; {_AGAIN}, or convert the original again"
    count = values.get(f"{architecture}.block_count")
    if count != layers:
        yield f"block_count = {excerpt(str(count))}, but the file has tensors of {layers} layers; {_AGAIN}"


def _missing_tensors(architecture: str, shapes: Shapes, layers: Mapping[str, Sequence[str]]) -> Iterator[str]:
    needed = [*_OF_LAYERS]
    needed += [] if architecture in _NO_GATE else [("ffn_gate.weight", "ffn_gate_exps.weight")]
    needed += [] if architecture in _NO_NORM else [("ffn_norm.weight",)]
    needed += [(name,) for name in _MORE.get(architecture, ())]
    for name in _OUTER:
        if name not in shapes:
            yield f"has no tensor {name}; {_AGAIN}"
    counted = Counter(chain.from_iterable(layers.values()))
    # What one layer has, all have.
    needed += [
        (name,) for name, count in counted.items() if count < len(layers) and name.endswith((".weight", ".bias"))
    ]
    for names in needed:
        if sum(counted[name] for name in names) < len(layers):
            lacking = next(number for number, held in layers.items() if not set(names) & set(held))
            yield f"has no tensor {excerpt(f'blk.{lacking}.{names[0]}')}; {_AGAIN}"


def _wrong_shapes(architecture: str, values: Mapping[str, Any], shapes: Shapes) -> Iterator[str]:
    of_layers: dict[str, Sequence[int]] = {}
    for name, shape in shapes.items():
        inner = name.split(".", 2)[-1] if name.startswith("blk.") else name
        if name.startswith("blk.") and shape != of_layers.setdefault(inner, shape):
            other = _sizes(of_layers[inner])
            yield f"tensor {excerpt(name)} is {_sizes(shape)}, and {other} in another layer; {_AGAIN}"
        place, size = _SIZE_OF.get(inner, (0, ""))
        expected = values.get(f"{architecture}.{size}")
        if size and type(expected) is int and (len(shape) <= place or shape[place] != expected):
            yield (
                f"tensor {excerpt(name)} is {_sizes(shape)}, and {architecture}.{size} = {expected} is not its"
                f" {('first', 'second')[place]} size; {_AGAIN}"
            )
    tokens = {values.get(f"{architecture}.vocab_size"), values.get("tokenizer.ggml.tokens")} - {None}
    embedded = shapes["token_embd.weight"]
    if tokens and (len(embedded) < 2 or embedded[1] not in tokens):
        numbers = " and ".join(sorted(excerpt(str(number)) for number in tokens))
        yield f"tensor token_embd.weight is {_sizes(embedded)}, and the file has {numbers} tokens; {_AGAIN}"


def _sizes(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))
