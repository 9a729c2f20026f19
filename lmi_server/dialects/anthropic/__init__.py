"""Anthropic's dialect: messages, and the number of their tokens.

request.py   /v1/messages and /v1/messages/count_tokens: the fields
turns.py     the conversation: system, messages and their blocks
answer.py    one message, or the events of its creation
"""

from lmi_server.dialects import routes
from lmi_server.dialects.anthropic.answer import count_body
from lmi_server.dialects.anthropic.request import MESSAGE_FIELDS, parse_count, parse_message
from lmi_server.dialects.optional import OptionalDialect, TokenCount

__all__ = ["DIALECT", "count_body", "parse_count", "parse_message"]

DIALECT = OptionalDialect(
    summaries={
        routes.MESSAGES: "Anthropic: create a message",
        routes.COUNT_TOKENS: "Anthropic: count the tokens of a message",
    },
    paths={"/v1/messages": routes.MESSAGES, "/v1/messages/count_tokens": routes.COUNT_TOKENS},
    parsers={routes.MESSAGES: parse_message},
    counts={routes.COUNT_TOKENS: TokenCount(parse_count, count_body)},
    bodies=dict.fromkeys((routes.MESSAGES, routes.COUNT_TOKENS), MESSAGE_FIELDS),
)
