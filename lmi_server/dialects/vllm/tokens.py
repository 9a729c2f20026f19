"""vLLM's /tokenize and /detokenize: the token ids of a prompt or a chat, and the text of token ids."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import msgspec

from lmi_server.contract.errors import RequestError
from lmi_server.contract.generation import GenerationRequest, SamplingParameters
from lmi_server.contract.protocol import Input
from lmi_server.dialects import fields
from lmi_server.dialects.base import ServedModel
from lmi_server.dialects.fields import Field
from lmi_server.dialects.framing import encode
from lmi_server.dialects.openai import messages as chats
from lmi_server.dialects.openai.request import model_warnings

TOKENIZE_FIELDS: dict[str, Field] = {
    "model": Field("model", fields.string),
    "prompt": Field("prompt", fields.string),
    "tools": Field("tools", chats.tools),
    "return_token_strs": Field(None, fields.off("leave it out, or send each token to /detokenize")),
    **chats.TEMPLATE_FIELDS,
}
DETOKENIZE_FIELDS: dict[str, Field] = {
    "model": Field("model", fields.string),
    "tokens": Field("tokens", fields.token_ids),
}


_ALWAYS_TOKENS = 100_000  # ids that are read whatever the context of the model


class Tokens(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: Sequence[int]


class Text(msgspec.Struct):
    prompt: str


def parse_tokenize(request: Input, served: ServedModel) -> tuple[GenerationRequest, tuple[str, ...]]:
    """Return the prompt as a request to tokenize (nothing is generated from it), and warnings. Raises RequestError."""
    values, warnings = _read(request, fields.json_object(request), TOKENIZE_FIELDS, served)
    if ("prompt" in values) == ("messages" in values):
        raise RequestError('send either "prompt", a string, or "messages", those of a chat')
    prompt: str | None = values.get("prompt")
    messages = values.get("messages")
    if messages is not None:
        messages = chats.for_model(messages, served)
    to_tokenize = GenerationRequest(
        request_id=secrets.token_hex(16),
        prompt=prompt,
        messages=messages,
        tools=values.get("tools"),
        chat=chats.chat_options({name: values[name] for name in _CHAT_OPTIONS if name in values}),
        sampling=SamplingParameters(max_new_tokens=None),
        # A chat template writes the special tokens itself; a plain prompt has none yet.
        add_special_tokens=values.get("add_special_tokens", prompt is not None),
    )
    return to_tokenize, warnings


_CHAT_OPTIONS = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs")


def parse_detokenize(request: Input, served: ServedModel) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the token ids, and warnings. Raises RequestError."""
    given = fields.json_object(request)
    max_tokens = max(_ALWAYS_TOKENS, served.max_model_len)
    if isinstance(given.get("tokens"), list) and len(given["tokens"]) > max_tokens:
        raise RequestError(f"tokens has {len(given['tokens'])} token ids; send at most {max_tokens} at once")
    values, warnings = _read(request, given, DETOKENIZE_FIELDS, served)
    if "tokens" not in values:
        raise RequestError("tokens is missing; send a list of token ids")
    return values["tokens"], warnings


def tokens_body(tokens: Sequence[int], served: ServedModel) -> bytes:
    """Return the answer of /tokenize."""
    return encode(Tokens(len(tokens), served.max_model_len, tokens))


def text_body(text: str) -> bytes:
    """Return the answer of /detokenize."""
    return encode(Text(text))


def _read(
    request: Input, given: dict[str, Any], known: dict[str, Field], served: ServedModel
) -> tuple[dict[str, Any], tuple[str, ...]]:
    values, unknown = fields.read_fields(given, known)
    warnings = fields.unknown_warnings(unknown, known)
    return values, warnings + model_warnings(request, values.get("model"), served)
