"""A tiny Llama whose answers are written down: each token has one successor, whatever came before.

Its layers add nothing, so that the last token alone decides. A prompt that ends in the name of a script is answered
with that script. After any other prompt the first of `_FIRST` that may follow comes next: if the output is constrained,
texts, lists and objects end as soon as they may end, and so does the answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

_FIRST = '"}]:,{[0123456789'
_END = "</s>"
TEMPLATE = (
    "{%- if tools %}{# <tool_call> #}{% for tool in tools %}{{ tool.function.name }} {% endfor %}{% endif -%}"
    "{%- for message in messages %} {{ message.content }}"
    "{% for call in message.tool_calls or [] %} {{ call.function.arguments | tojson }}{% endfor %}{% endfor %}"
)


def save_scripted_model(directory: Path, scripts: Mapping[str, str], template: str = TEMPLATE) -> Path:
    """Write a model to `directory` that answers the name of each script, which is a word, with its text."""
    others = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(_FIRST))
    vocabulary = {letters: index for index, letters in enumerate([*_FIRST, _END, *others, *scripts])}
    successors: dict[int, int] = {}
    for name, text in scripts.items():
        last = vocabulary[name]
        for piece in _pieces(_letters(text), vocabulary):
            vocabulary[piece] = successors[last] = len(vocabulary)
            last = vocabulary[piece]
        successors[last] = vocabulary[_END]
    _model(len(vocabulary), successors, vocabulary[_END]).save_pretrained(directory)
    _tokenizer(vocabulary, list(scripts), template).save_pretrained(directory)
    return directory


def _pieces(text: str, vocabulary: Mapping[str, int]) -> list[str]:
    """Return `text` in pieces of a few characters, none of which is in the vocabulary yet."""
    pieces: list[str] = []
    while text:
        size = next((size for size in range(3, len(text)) if text[:size] not in {*vocabulary, *pieces}), len(text))
        pieces.append(text[:size])
        text = text[size:]
    while pieces[-1] in {*vocabulary, *pieces[:-1]}:
        pieces[-2:] = ["".join(pieces[-2:])]
    return pieces


def _tokenizer(vocabulary: dict[str, int], names: list[str], template: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer that reads names of scripts, and single bytes of everything else."""
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.add_tokens(names)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=_END)
    tokenizer.chat_template = template
    return tokenizer


def _letters(text: str) -> str:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return "".join(letters for letters, _ in byte_level.pre_tokenize_str(text))


def _model(size: int, successors: Mapping[int, int], end: int) -> LlamaForCausalLM:
    width = -(-size // 64) * 64
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=size,
            hidden_size=width,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=width // 64,
            num_key_value_heads=1,
            max_position_embeddings=2048,
            tie_word_embeddings=False,
            eos_token_id=end,
            bos_token_id=None,
            pad_token_id=None,
        )
    )
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(size, width))
        model.lm_head.weight.zero_()
        for token, successor in successors.items():
            model.lm_head.weight[successor, token] = 1.0
    return model
