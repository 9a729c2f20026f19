"""Long prompts are prepared in other threads than the event loop's."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
from relay_helpers import on_loop
from tiny_models import byte_tokenizer
from tokenizers import AddedToken

from handlers.checkpoints.text_length import LONG_TEXT_CHARS
from handlers.generation.prompts import PromptEncoder
from lmi_server.contract.errors import ContextLengthError, RequestError
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


def request_of(prompt: str | None = None, **more: Any) -> GenerationRequest:
    return GenerationRequest(request_id="1", prompt=prompt, **{"sampling": SamplingParameters(), **more})


TRUNCATED = SamplingParameters(truncate=10)
CHAT = ({"role": "user", "content": "a" * 20_000_000},)


@pytest.mark.parametrize(
    "ask",
    [
        lambda encoder: encoder.count(request_of("a" * 20_000_000), 64),
        lambda encoder: encoder.count(request_of(messages=CHAT), 64),
        lambda encoder: encoder.encode(request_of(messages=CHAT), 64),
        lambda encoder: encoder.encode(request_of(messages=({"role": "user", "content": ""},) * 2_000_000), 64),
        lambda encoder: encoder.encode(request_of("a" * 20_000_000, sampling=TRUNCATED), 64),
    ],
)
def test_a_text_far_longer_than_the_context_is_refused_at_once(ask: Callable[[PromptEncoder], Any]) -> None:
    encoder = PromptEncoder(byte_tokenizer())
    with pytest.raises(ContextLengthError, match="maximum context length is 64 tokens"):
        asyncio.run(ask(encoder))


def test_texts_to_count_and_to_cut_may_be_longer_than_the_context() -> None:
    encoder = PromptEncoder(byte_tokenizer())
    text = "word " * LONG_TEXT_CHARS
    ids = asyncio.run(encoder.count(request_of(text), 64))
    assert asyncio.run(encoder.encode(request_of(text, sampling=TRUNCATED), 64)) == (ids[-10:], text)


@on_loop
async def test_a_prompt_does_not_wait_for_texts_that_are_counted_or_cut() -> None:
    """The thread for these is held here until the prompt is there."""

    encoder = PromptEncoder(byte_tokenizer())
    gate = threading.Event()
    held = [thread.submit(gate.wait) for thread in (encoder._side_thread, encoder._python_side_thread)]
    text = "a" * (2 * LONG_TEXT_CHARS)
    chat = ({"role": "user", "content": text},)
    encoder.tokenizer.chat_template = "{{ messages[0].content }}"
    others = [
        asyncio.ensure_future(encoder.count(request_of(text))),
        asyncio.ensure_future(encoder.count(request_of(messages=chat))),
        asyncio.ensure_future(encoder.encode(request_of(text, sampling=TRUNCATED))),
        asyncio.ensure_future(encoder.detokenize([65] * (LONG_TEXT_CHARS + 1))),
    ]
    await asyncio.sleep(0)
    for prompt in (request_of(text), request_of(messages=chat)):
        ids, _ = await encoder.encode(prompt)
        assert len(ids) == len(text)
    assert not any(other.done() for other in others)
    gate.set()
    await asyncio.gather(*others, *map(asyncio.wrap_future, held))


def test_a_token_that_the_vocabulary_lacks_is_named() -> None:
    encoder = PromptEncoder(byte_tokenizer())
    for tokens, unknown in (([1, 10_000], "10000"), ([1, -3, 2], "-3")):
        with pytest.raises(RequestError, match=f"token id {unknown} is not in the vocabulary"):
            asyncio.run(encoder.detokenize(tokens))
    assert asyncio.run(encoder.detokenize([])) == ""
