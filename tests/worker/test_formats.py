"""Who parses requests, and where: a long body keeps no stream of the worker waiting."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from dialect_helpers import SERVED, request

from lmi_server.contract.errors import RequestError
from lmi_server.contract.handler import LLMHandler
from lmi_server.contract.protocol import Input, Load
from lmi_server.dialects.base import Exchange
from lmi_server.worker.handler_loading import make_handler
from lmi_server.worker.processors.formats import Formats

MANY_MESSAGES = {"model": "model", "messages": [{"role": "user", "content": "a"}] * 100_000}


def formats(directory: Path) -> Formats:
    name = "handlers.echo.handler:EchoHandler"
    handler, loading = make_handler(Load("model", str(directory), name, {"model_id": str(directory)}, ["model"]))
    assert isinstance(handler, LLMHandler)
    return Formats(loading, handler)


async def turns_while_parsed(reader: Formats, sent: Input) -> tuple[int, Exchange]:
    """Return how often the loop turns until the request is parsed."""
    turns, parsed = 0, asyncio.ensure_future(reader.parse_any(sent, SERVED))
    while not parsed.done():
        await asyncio.sleep(0)
        turns += 1
    return turns, await parsed


def test_the_loop_turns_while_a_long_body_is_parsed(tmp_path: Path) -> None:
    turns, exchange = asyncio.run(turns_while_parsed(formats(tmp_path), request("chat/completions", MANY_MESSAGES)))
    assert turns > 3
    assert len(exchange.requests[0].messages or ()) == 100_000


def test_a_short_body_is_parsed_at_once(tmp_path: Path) -> None:
    short: dict[str, Any] = {"model": "model", "messages": [{"role": "user", "content": "a"}]}
    turns, _ = asyncio.run(turns_while_parsed(formats(tmp_path), request("chat/completions", short)))
    assert turns <= 2


def test_what_is_wrong_in_a_long_body_is_said(tmp_path: Path) -> None:
    wrong = request("chat/completions", {**MANY_MESSAGES, "temperature": "hot"})
    with pytest.raises(RequestError, match="temperature"):
        asyncio.run(formats(tmp_path).parse_any(wrong, SERVED))
