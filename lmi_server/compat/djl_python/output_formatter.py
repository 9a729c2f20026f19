"""The decorator for the function of a `model.py` that writes answers, the types of its arguments, and LMI's own forms.

The forms are for code that batches itself and for formatters that change a part of LMI's answer. Built-in handlers
write their answers without them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from djl_python.request_io import RequestInput, RequestOutput, Sequence, TextGenerationOutput, TextInput, Token

__all__ = [
    "RequestInput",
    "RequestOutput",
    "Sequence",
    "TextGenerationOutput",
    "TextInput",
    "Token",
    "adapt_legacy_output_formatter",
    "get_details_dict",
    "get_generated_text",
    "get_output_formatter",
    "get_sequence_details",
    "output_formatter",
    "sse_response_formatter",
]

F = TypeVar("F", bound=Callable[..., Any])
Formatter = Callable[[TextGenerationOutput], str]


def output_formatter(function: F) -> F:
    """Mark the function that writes answers: `fn(output: TextGenerationOutput) -> str`."""
    function.is_output_formatter = True  # type: ignore[attr-defined]
    return function


def get_generated_text(sequence: Sequence, request_output: TextGenerationOutput) -> str:
    """Return the text of a sequence, after the prompt if the request asks for `return_full_text`."""
    given = request_output.input
    prompt = given.input_text if given.parameters.get("return_full_text") else ""
    return str(prompt) + "".join(token.text for token in sequence.tokens)


def get_sequence_details(request_output: TextGenerationOutput, sequence_index: int) -> dict[str, Any]:
    """Return reason, number and list of the tokens of a sequence."""
    sequence = request_output.sequences[sequence_index]
    details: dict[str, Any] = {
        "finish_reason": sequence.finish_reason,
        "generated_tokens": len(sequence.tokens),
        "tokens": request_output.get_tokens_as_dict(sequence_index),
    }
    if sequence.top_tokens:
        details["top_tokens"] = request_output.get_top_tokens_as_dict(sequence_index)
    return details


def get_details_dict(request_output: TextGenerationOutput, include_tokens: bool = True) -> dict[str, Any]:
    """Return the `details` of an answer; empty if the request does not ask for them."""
    given = request_output.input
    if not (given.parameters.get("details") or given.tgi_compat):
        return {}
    details = get_sequence_details(request_output, request_output.best_sequence_index)
    details["inputs"] = given.input_text
    if not include_tokens:
        del details["tokens"]
    if given.parameters.get("decoder_input_details"):
        details["prefill"] = request_output.get_prompt_tokens_as_dict()
    return details


def sse_response_formatter(request_output: TextGenerationOutput) -> str:
    """Return the unread tokens as server-sent events."""
    return "".join(f"data: {line}\n\n" for line in _lines(request_output))


def adapt_legacy_output_formatter(request_output: TextGenerationOutput) -> str:
    """Call the request's formatter of six arguments for the next token: token, first, last, details, text, id."""
    sequence = request_output.best_sequence
    token, _, first, last = sequence.get_next_token()
    if token is None:
        return ""
    text = get_generated_text(sequence, request_output) if last else ""
    function = request_output.input.output_formatter
    return str(function(token, first, last, get_details_dict(request_output), text, request_output.request_id))


def get_output_formatter(
    output_formatter: str | Callable[..., Any] | None, stream: bool, tgi_compat: bool
) -> tuple[Callable[..., Any], str]:
    """Return the function that writes an answer, and the content type of the answer.

    `output_formatter` is `json`, `jsonlines`, `sse`, `none`, or a function; by default `stream` decides.
    """
    if callable(output_formatter):
        return output_formatter, "application/jsonlines" if stream else "application/json"
    streamed = "sse" if tgi_compat else "jsonlines"
    return _FORMS.get(str(output_formatter), _FORMS[streamed if stream else "json"])


def _json_output_formatter(request_output: TextGenerationOutput) -> str:
    if not request_output.finished:
        return ""
    body: dict[str, Any] = {"generated_text": get_generated_text(request_output.best_sequence, request_output)}
    _add_details(body, get_details_dict(request_output))
    return _written([body] if request_output.input.tgi_compat else body)


def _jsonlines_output_formatter(request_output: TextGenerationOutput) -> str:
    return "".join(f"{line}\n" for line in _lines(request_output))


def _text_output_formatter(request_output: TextGenerationOutput) -> str:
    sequence, texts = request_output.best_sequence, []
    while sequence.has_next_token():
        token = sequence.get_next_token()[0]
        texts.append(token.text if token is not None else "")
    return "".join(texts)


def _lines(request_output: TextGenerationOutput) -> list[str]:
    sequence, lines = request_output.best_sequence, []
    while sequence.has_next_token():
        token, _, _, last = sequence.get_next_token()
        assert token is not None
        line: dict[str, Any] = {"token": token.as_tgi_dict() if request_output.input.tgi_compat else token.as_dict()}
        if last:
            line["generated_text"] = get_generated_text(sequence, request_output)
            _add_details(line, get_details_dict(request_output, include_tokens=False))
        lines.append(_written(line))
    return lines


def _add_details(body: dict[str, Any], details: Mapping[str, Any]) -> None:
    if details:
        body["details"] = details


def _written(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


_FORMS: Mapping[str, tuple[Formatter, str]] = {
    "json": (_json_output_formatter, "application/json"),
    "jsonlines": (_jsonlines_output_formatter, "application/jsonlines"),
    "sse": (sse_response_formatter, "text/event-stream"),
    "none": (_text_output_formatter, "text/plain"),
}
