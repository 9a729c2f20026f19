"""Text generation as a function: yields the words of the prompt. For tests only."""

from __future__ import annotations

from collections.abc import AsyncIterator

from lmi_server.errors import RequestError
from lmi_server.generation import GenerationRequest


async def generate(request: GenerationRequest) -> AsyncIterator[str]:
    prompt = request.messages[-1]["content"] if request.messages else str(request.prompt)
    if prompt == "refuse":
        raise RequestError("refused")
    for word in prompt.split():
        yield f" {word}"
