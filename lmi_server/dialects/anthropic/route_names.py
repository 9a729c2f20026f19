"""The routes of Anthropic's API."""

from __future__ import annotations

MESSAGES = "messages"
COUNT_TOKENS = "messages/count_tokens"
