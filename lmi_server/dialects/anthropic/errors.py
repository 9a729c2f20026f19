"""How errors read in Anthropic's API: its statuses are those of OpenAI's but one, and its types follow from them."""

from __future__ import annotations

from lmi_server.contract.errors import ContextLengthError, LmiServerError
from lmi_server.dialects.optional import ErrorForm

_STATUSES = {503: 529}
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}
_SCHEMA = {
    "type": {"const": "error"},
    "error": {"type": "object", "properties": {"type": {"type": "string"}, "message": {"type": "string"}}},
    "request_id": {"type": "string"},
}


def _write(error: LmiServerError, openai_status: int, request_id: str) -> tuple[int, dict[str, object]]:
    status = _STATUSES.get(openai_status, openai_status)
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    message = _length_message(error) if isinstance(error, ContextLengthError) else error.message
    return status, {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id or None}


def _length_message(error: ContextLengthError) -> str:
    """Return the message by which Anthropic's clients recognise a conversation that is too long."""
    if not error.prompt:
        return f"prompt is too long: {error.message}"
    if error.prompt >= error.limit:
        return f"prompt is too long: {error.prompt} tokens > {error.limit} maximum"
    return (
        f"input length and `max_tokens` exceed context limit: {error.prompt} + {error.new} > {error.limit},"
        " decrease input length or `max_tokens` and try again"
    )


FORM = ErrorForm(_write, "error", "AnthropicError", _SCHEMA)
