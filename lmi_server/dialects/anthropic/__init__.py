"""Anthropic's dialect: messages, and the number of their tokens.

request.py   /v1/messages and /v1/messages/count_tokens: the fields
turns.py     the conversation: system, messages and their blocks
answer.py    one message, or the events of its creation
errors.py    how errors read
models.py    the list of models
"""

from lmi_server.dialects.anthropic import errors, models
from lmi_server.dialects.anthropic.answer import count_body
from lmi_server.dialects.anthropic.request import MESSAGE_FIELDS, parse_count, parse_message
from lmi_server.dialects.anthropic.route_names import COUNT_TOKENS, MESSAGES
from lmi_server.dialects.optional import OptionalDialect, TokenCount

__all__ = ["DIALECT", "count_body", "parse_count", "parse_message"]

_ROUTES = (MESSAGES, COUNT_TOKENS)

DIALECT = OptionalDialect(
    summaries={
        MESSAGES: "Anthropic: create a message",
        COUNT_TOKENS: "Anthropic: count the tokens of a message",
    },
    paths={"/v1/messages": MESSAGES, "/v1/messages/count_tokens": COUNT_TOKENS},
    parsers={MESSAGES: parse_message},
    counts={COUNT_TOKENS: TokenCount(parse_count, count_body)},
    bodies=dict.fromkeys(_ROUTES, MESSAGE_FIELDS),
    model_fields=dict.fromkeys(_ROUTES, "model"),
    chats={MESSAGES: "messages"},
    errors=dict.fromkeys(_ROUTES, errors.FORM),
    id_headers=dict.fromkeys(_ROUTES, b"request-id"),  # by which Anthropic's clients log a request
    model_lists={"anthropic-version": models.FORM},  # the header that these clients send with every request
)
