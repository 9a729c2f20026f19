"""OpenAI's SDK as the client of a server of the tests."""

from __future__ import annotations

from typing import Any

from server_helpers import Server

KEYS = ("first-key-0123456789", "second-key-0123456789")


def client_of(server: Server, key: str = KEYS[0]) -> Any:
    """Return a client that is closed when its server ends."""
    import openai

    client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key=key, max_retries=0)
    return server.clients.enter_context(client)
