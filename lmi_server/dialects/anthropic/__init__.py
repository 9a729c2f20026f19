"""Anthropic's dialect: messages, and the number of their tokens.

request.py   /v1/messages and /v1/messages/count_tokens: the fields
turns.py     the conversation: system, messages and their blocks
answer.py    one message, or the events of its creation
"""

from lmi_server.dialects.anthropic.answer import count_body
from lmi_server.dialects.anthropic.request import parse_count, parse_message

__all__ = ["count_body", "parse_count", "parse_message"]
