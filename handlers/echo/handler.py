"""The echo handler: answers with the words of the prompt. Without an engine, it measures and tests the relay alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Mapping
from itertools import cycle, islice

from handlers.echo.options import EchoOptions
from lmi_server.contract.generation import Delta, GenerationRequest, Token, Usage
from lmi_server.contract.handler import LLMHandler, ModelInfo
from lmi_server.contract.protocol import Adapter

_MAX_MODEL_LEN = 1 << 20


class EchoHandler(LLMHandler):
    """Emits the words of the prompt as tokens, repeatedly, until there are `max_new_tokens` of them."""

    def __init__(self) -> None:
        self._delay_s: float | None = None
        self._running = 0
        self._adapters: dict[str, Adapter] = {}

    async def start(self, model_dir: str, options: EchoOptions) -> ModelInfo:
        if options.echo_step or options.echo_delay_ms:
            self._delay_s = options.echo_delay_ms / 1000  # a delay of 0 still gives other requests a turn
        return ModelInfo(max_model_len=_MAX_MODEL_LEN, details={"echo_delay_ms": options.echo_delay_ms})

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        self._running += 1
        try:
            text = _prompt_text(request)
            if request.adapter is not None:
                text = f"{request.adapter}: {text}"
            words = text.split() or ["echo"]
            tokens = [Token(index, f" {word}", 0.0) for index, word in enumerate(words)]
            count = request.sampling.max_new_tokens
            for delta in _deltas(tokens, len(words) if count is None else count, text):
                if self._delay_s is not None:
                    await asyncio.sleep(self._delay_s)
                yield delta
        finally:
            self._running -= 1

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        return self._adapters

    async def add_adapter(self, adapter: Adapter) -> None:
        """Accept any adapter; an answer begins with the name of its adapter."""
        self._adapters[adapter.name] = adapter

    async def remove_adapter(self, name: str) -> None:
        self._adapters.pop(name, None)

    async def sleep(self) -> None:
        """Do nothing: there is nothing to give back."""

    async def reset_prefix_cache(self, running: bool, external: bool) -> bool:
        """Return True: nothing is kept of prompts."""
        return True

    async def tokenize(self, request: GenerationRequest) -> list[int]:
        return list(range(len(_prompt_text(request).split())))

    def stats(self) -> dict[str, float]:
        return {"running_requests": self._running}


def _deltas(tokens: list[Token], count: int, prompt_text: str) -> Iterator[Delta]:
    usage = Usage(prompt_tokens=len(tokens), completion_tokens=count)
    # The deltas between the first and the last are shared, because a benchmark of the relay emits millions of them.
    deltas = [Delta(token.text, (token,)) for token in tokens]
    for index, delta in enumerate(islice(cycle(deltas), count)):
        first, last = index == 0, index == count - 1
        if not first and not last:
            yield delta
            continue
        yield Delta(
            delta.text,
            delta.tokens,
            finish_reason="length" if last else None,
            usage=usage if last else None,
            prompt_text=prompt_text if first else None,
            prompt_token_ids=range(len(tokens)) if first else None,
        )


def _prompt_text(request: GenerationRequest) -> str:
    if request.messages is not None:
        return "\n".join(str(message.get("content") or "") for message in request.messages)
    if isinstance(request.prompt, tuple):
        return " ".join(str(token_id) for token_id in request.prompt)
    return request.prompt or ""
