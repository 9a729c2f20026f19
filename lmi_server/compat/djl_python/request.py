"""A request of a rolling batch: what it asks for, and its answer as far as it is generated."""

from __future__ import annotations

import inspect
from typing import Any

from djl_python.output_formatter import adapt_legacy_output_formatter, get_output_formatter
from djl_python.request_io import RequestInput, RequestOutput, TextGenerationOutput, TextInput, Token

_NEW_FORMS = (RequestOutput, TextGenerationOutput, "RequestOutput", "TextGenerationOutput")


class Request:
    """Collects the tokens of a request with `set_next_token`; `get_next_token` is the text to send for them."""

    def __init__(self, request_input: RequestInput | None = None) -> None:
        request_input = request_input or TextInput()
        self.id = request_input.request_id
        self.request_input = request_input
        self.input_text = getattr(request_input, "input_text", None)
        self.adapter = getattr(request_input, "adapters", None)
        self.last_token = False
        request_input.server_parameters = request_input.server_parameters or dict(request_input.parameters)
        self.parameters = request_input.server_parameters  # for the engine, without the ones for the form of the answer
        stream = bool(self.parameters.pop("stream", False))
        self.parameters.pop("details", None)
        form = self.parameters.pop("output_formatter", None) or request_input.output_formatter
        self.output_formatter, self.content_type = get_output_formatter(form, stream, request_input.tgi_compat)
        request_input.output_formatter = self.output_formatter
        self.legacy_formatter = _is_legacy(self.output_formatter)
        self.request_output = TextGenerationOutput(self.id, request_input)
        self.next_token_str = ""
        self.error_message: str | None = None
        self.error_code: int | None = None

    def set_next_token(self, next_token: Token, last_token: bool = False, finish_reason: str | None = None) -> None:
        """Add a token of the best sequence."""
        self.last_token = last_token
        index = self.request_output.best_sequence_index
        self.request_output.set_next_token(next_token, index, last_token, finish_reason)
        self.request_output.finished = last_token

    def get_next_token(self) -> str:
        """Return the output for the tokens since the last call."""
        if self.next_token_str:
            return self.next_token_str
        if self.legacy_formatter:
            self.next_token_str = adapt_legacy_output_formatter(self.request_output)
        else:
            self.next_token_str = str(self.output_formatter(self.request_output))
        return self.next_token_str

    def reset_next_token(self) -> None:
        self.next_token_str = ""

    def is_last_token(self) -> bool:
        return self.last_token

    def get_content_type(self) -> str:
        return self.content_type

    def get_error_message(self) -> str | None:
        return self.error_message

    def get_error_code(self) -> int | None:
        return self.error_code

    def set_error_message(self, error_message: str) -> None:
        self.error_message = error_message

    def set_error_code(self, code: int) -> None:
        self.error_code = code

    def get_client_request_id(self) -> str | None:
        return self.request_input.client_request_id

    def __repr__(self) -> str:
        return f"Request(id={self.id}, last_token={self.last_token}, error_message={self.error_message!r})"


def _is_legacy(function: Any) -> bool:
    first = next(iter(inspect.signature(function).parameters.values()), None)
    annotation = getattr(first, "annotation", None)
    known = annotation.rpartition(".")[2] if isinstance(annotation, str) else annotation
    return known not in _NEW_FORMS
