"""Serves text generation with the user's function `generate`, an asynchronous generator."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Any

import msgspec

from lmi_server.contract.errors import LmiServerError, ModelLoadError, RequestError
from lmi_server.contract.generation import Delta, GenerationRequest, Token, Usage
from lmi_server.contract.handler import AsyncRequestHandler, LLMHandler, ModelInfo, RequestHandler, Response
from lmi_server.contract.protocol import Input

_MAX_MODEL_LEN = 1 << 20
_UNKNOWN_ID = -1  # the id of a piece of text, which is no token of a vocabulary

Generate = Callable[[GenerationRequest], AsyncIterator[Delta | str]]


class GenerateFunction(LLMHandler):
    """Yields what the function yields, a text as a delta of one token. The end of the function ends the sequence."""

    def __init__(self, generate: Generate) -> None:
        self._generate = generate

    async def start(self, model_dir: str, options: Any) -> ModelInfo:
        return ModelInfo(max_model_len=_MAX_MODEL_LEN)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        prompt_text = request.prompt if isinstance(request.prompt, str) else None
        tokens = 0
        async for piece in self._generate(request):
            delta = Delta(piece, (Token(_UNKNOWN_ID, piece),)) if isinstance(piece, str) else piece
            yield delta if prompt_text is None else _with_prompt(delta, prompt_text)
            prompt_text = None
            if delta.finish_reason is not None:
                return
            tokens += len(delta.tokens)
        usage = Usage(prompt_tokens=_prompt_tokens(request), completion_tokens=tokens)
        yield Delta("", finish_reason="eos_token", usage=usage, prompt_text=prompt_text)

    async def tokenize(self, request: GenerationRequest) -> list[int]:
        raise RequestError("the model's own code generates text and has no tokenizer")


def _with_prompt(delta: Delta, prompt_text: str) -> Delta:
    return delta if delta.prompt_text is not None else msgspec.structs.replace(delta, prompt_text=prompt_text)


def _prompt_tokens(request: GenerationRequest) -> int:
    prompt = request.prompt
    return len(prompt.split()) if isinstance(prompt, str) else len(prompt or ())


class ConcurrentDelegate(RequestHandler):
    """Leaves all requests to a handler that serves them concurrently."""

    def __init__(self, handler: AsyncRequestHandler | LLMHandler) -> None:
        self._handler = handler

    def start(self, model_dir: str, options: Any) -> ModelInfo:
        return ModelInfo(max_model_len=0)

    def handle(self, requests: Sequence[Input]) -> Sequence[Response | LmiServerError]:
        raise ModelLoadError("the handler serves its requests concurrently")

    def concurrent_handler(self) -> AsyncRequestHandler | LLMHandler:
        return self._handler
