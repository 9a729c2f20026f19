"""Long prompts are prepared in other threads than the event loop's."""

from __future__ import annotations

import asyncio
import os
import threading
from typing import Any

import pytest
from tiny_models import byte_tokenizer
from tokenizers import AddedToken

from handlers.checkpoints.text_length import LONG_TEXT_CHARS
from handlers.rolling_batch.prompts import PromptEncoder
from lmi_server.contract.errors import ContextLengthError
from lmi_server.contract.generation import GenerationRequest, SamplingParameters

pytestmark = pytest.mark.slow


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


class Watched:
    """A tokenizer's backend. `encoding` and `listing` are the threads, with their niceness, that do each."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.encoding: tuple[int, int] | None = None
        self.listing: tuple[int, int] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def encode_batch_fast(self, texts: list[str], add_special_tokens: bool) -> list[Any]:
        self.encoding = threading.get_ident(), niceness()
        (encoding,) = self._backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        watched = self

        class Encoding:
            def __len__(self) -> int:
                return len(encoding)

            @property
            def ids(self) -> list[int]:
                watched.listing = threading.get_ident(), niceness()
                return list(encoding.ids)

        return [Encoding()]


def test_the_thread_that_gives_way_to_others_does_nothing_that_keeps_the_gil() -> None:
    """Whoever waits for the GIL would wait until that thread gets a core."""
    encoder = PromptEncoder(byte_tokenizer())
    encoder._backend = watched = Watched(encoder._backend)
    text = "word " * LONG_TEXT_CHARS
    request = GenerationRequest(request_id="1", prompt=text, sampling=SamplingParameters())
    ids, _ = asyncio.run(encoder.encode(request))
    assert ids == encoder.tokenize(text)
    assert watched.encoding is not None
    assert watched.listing is not None
    assert watched.encoding[0] != threading.get_ident()
    assert watched.encoding[1] > niceness()
    assert watched.listing[1] == niceness()


def test_of_a_prompt_that_is_refused_no_list_is_made() -> None:
    """Its length shows only when it is tokenized, because the tokenizer may drop any amount of space."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken("<mask>", lstrip=True)])
    encoder = PromptEncoder(tokenizer)
    encoder._backend = watched = Watched(encoder._backend)
    text = "word " * LONG_TEXT_CHARS
    request = GenerationRequest(request_id="1", prompt=text, sampling=SamplingParameters())
    count = len(encoder.tokenize(text))
    with pytest.raises(ContextLengthError, match=f"the prompt has {count} tokens"):
        asyncio.run(encoder.encode(request, count))
    assert watched.encoding is not None
    assert watched.listing is None
    assert len(asyncio.run(encoder.encode(request, count + 1))[0]) == count
