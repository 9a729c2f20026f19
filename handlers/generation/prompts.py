"""Turns the prompt of a generation request into token ids, with the tokenizer and its chat template."""

from __future__ import annotations

import asyncio
import functools
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jinja2 import TemplateError

from handlers.chats.messages import ContentForms, needs_text, template_messages, with_known_roles
from handlers.checkpoints.text_length import LONG_TEXT_CHARS, TextLength
from lmi_server.contract.errors import ContextLengthError, RequestError
from lmi_server.contract.generation import ChatOptions, GenerationRequest

_MANY_MESSAGES = 64
_NICENESS = 10  # of that thread: what runs has the first claim on the cores


class PromptEncoder:
    """Encodes prompts of any form: token ids, text or messages.

    `image` stands for an image in the prompts of a model that reads images; contents may be parts then.
    """

    def __init__(self, tokenizer: Any, image: str | None = None) -> None:
        self.tokenizer = tokenizer
        self._image = image
        self._length = TextLength(tokenizer)
        # One thread for each, so that any number of long prompts takes one core at most. A thread of low priority must
        # hardly ever have the GIL: a thread that waits for the GIL would wait until other programs leave it a core.
        self._thread = ThreadPoolExecutor(1, "tokenize", initializer=_yield_to_others)
        self._python_thread = ThreadPoolExecutor(1, "prompts")
        # Texts that may be longer than any prompt have threads of their own: no prompt waits for them.
        self._side_thread = ThreadPoolExecutor(1, "tokens", initializer=_yield_to_others)
        self._python_side_thread = ThreadPoolExecutor(1, "texts")
        # transformers' wrapper sets truncation and padding of the backend in every call, which fails while another
        # thread decodes with it. Calling the backend itself, with both switched off once, is safe from any thread.
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        if self._backend is not None:
            self._backend.no_truncation()
            self._backend.no_padding()

    async def encode(self, request: GenerationRequest, limit: int = 0) -> tuple[list[int], str]:
        """Return the token ids and the text of the request's prompt.

        Raises RequestError if the chat cannot be rendered, ContextLengthError if a long prompt has `limit` tokens or
        more (0: any number). A prompt that is cut to its last tokens may be longer.
        """
        truncate = request.sampling.truncate
        if isinstance(request.prompt, tuple):
            ids = list(request.prompt[-truncate:] if truncate else request.prompt)
            if 0 < limit <= len(ids):
                raise ContextLengthError.from_counts(len(ids), 0, limit)
            return ids, await self._decode(ids)
        if truncate:
            ids, text = await self._encode_any(request, limit)
            return ids[-truncate:], text
        text = await self._text(request, limit, self._python_thread)
        self._length.check(text, limit)
        special = _adds_special_tokens(request)
        # A long text would block the event loop. A short one is not worth the change of threads.
        if len(text) > LONG_TEXT_CHARS:
            return await self._tokenize_long(text, special, limit), text
        return self.tokenize(text, special), text

    async def render(self, request: GenerationRequest, limit: int = 0) -> str:
        """Return the text of a chat by its template. Raises as `encode`."""
        return await self._text(request, limit, self._python_thread)

    async def tokenize_rendered(self, text: str, limit: int = 0) -> list[int]:
        """Return the token ids of a rendered chat. Raises ContextLengthError as `encode`."""
        self._length.check(text, limit)
        return await self._tokenize_long(text, add_special_tokens=False, limit=limit)

    async def count(self, request: GenerationRequest, limit: int = 0) -> list[int]:
        """Return the token ids of a request's text or chat, which may be longer than a prompt.

        Raises RequestError as `encode`, ContextLengthError if it is far longer than a context of `limit` tokens.
        """
        return (await self._encode_any(request, limit))[0]

    async def _encode_any(self, request: GenerationRequest, limit: int) -> tuple[list[int], str]:
        text = await self._text(request, limit, self._python_side_thread)
        self._length.check_size(len(text), limit)
        special = _adds_special_tokens(request)
        if len(text) > LONG_TEXT_CHARS:
            return await self._tokenize_long(text, special, 0, aside=True), text
        return self.tokenize(text, special), text

    async def _text(self, request: GenerationRequest, limit: int, thread: ThreadPoolExecutor) -> str:
        if isinstance(request.prompt, str):
            return request.prompt
        most = self._length.max_chars(limit)
        chat = request.chat
        given = (request.messages, request.tools, chat.documents, chat.chat_template_kwargs)
        size = _size(given, most or sys.maxsize)
        self._length.check_size(size, limit)
        if len(request.messages or ()) < _MANY_MESSAGES and size <= LONG_TEXT_CHARS:
            return self._render(request)
        return await asyncio.get_running_loop().run_in_executor(thread, self._render, request)

    async def _tokenize_long(self, text: str, add_special_tokens: bool, limit: int, aside: bool = False) -> list[int]:
        """Do what `tokenize` does beside the event loop, and without the GIL: `encode` would keep that to the end.

        The list of ids takes milliseconds for each 100,000 with the GIL. So it is not made in the thread that gives way
        to others, and not at all for a refused prompt. Raises ContextLengthError as `encode`.
        """
        run = asyncio.get_running_loop().run_in_executor
        if self._backend is None:
            thread = self._python_side_thread if aside else self._python_thread
            return await run(thread, self.tokenize, text, add_special_tokens)
        encode = functools.partial(self._backend.encode_batch_fast, [text], add_special_tokens=add_special_tokens)
        encodings = await run(self._side_thread if aside else self._thread, encode)
        if 0 < limit <= len(encodings[0]):
            raise ContextLengthError.from_counts(len(encodings[0]), 0, limit)
        ids: list[int] = encodings[0].ids
        return ids

    def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`."""
        ids: list[int]
        if self._backend is not None:
            ids = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        else:
            ids = self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return ids

    async def detokenize(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids, special ones included. Raises RequestError if one is not in the vocabulary."""
        vocabulary = len(self.tokenizer)
        for token in (min(tokens, default=0), max(tokens, default=0)):
            if not 0 <= token < vocabulary:
                raise RequestError(f"token id {token} is not in the vocabulary of {vocabulary} tokens")
        return await self._decode(list(tokens))

    async def _decode(self, ids: list[int]) -> str:
        if len(ids) <= LONG_TEXT_CHARS:
            return str(self.tokenizer.decode(ids))
        return str(
            await asyncio.get_running_loop().run_in_executor(self._python_side_thread, self.tokenizer.decode, ids)
        )

    def _render(self, request: GenerationRequest) -> str:
        if not self.tokenizer.chat_template:
            raise RequestError(
                "the model's tokenizer has no chat template, so `messages` cannot be served; send `prompt` or `inputs`,"
                " or put a chat_template.jinja into the model directory"
            )
        chat = request.chat
        messages = with_known_roles(request.messages or (), self.tokenizer.chat_template)
        if self._image is not None:
            messages = self._content_forms(self._image).apply(messages)
        try:
            text: str = self.tokenizer.apply_chat_template(
                template_messages(messages, self._arguments_as_text),
                tools=list(request.tools) if request.tools else None,
                documents=list(chat.documents) if chat.documents else None,
                tokenize=False,
                add_generation_prompt=chat.add_generation_prompt,
                continue_final_message=chat.continue_final_message,
                **_template_arguments(chat),
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise RequestError(f"the chat template refuses these messages: {error}") from error
        return text

    @functools.cache  # noqa: B019 - one encoder for each model, which lives as long as the process
    def _content_forms(self, image: str) -> ContentForms:
        return ContentForms.from_template(
            lambda messages: str(self.tokenizer.apply_chat_template(messages, tokenize=False)), image
        )

    @functools.cache  # noqa: B019 - one encoder for each model, which lives as long as the process
    def _arguments_as_text(self) -> bool:
        """Return whether the template needs the arguments of calls as text; found out when the first call comes."""
        return needs_text(
            lambda messages, tools: self.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
        )


def _yield_to_others() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


def _adds_special_tokens(request: GenerationRequest) -> bool:
    return request.add_special_tokens and request.prompt is not None  # a chat template writes them itself


def _size(value: Any, limit: int) -> int:
    """Return how many characters and entries a value has, or some number above `limit` if they are more."""
    size, left = 0, [value]
    while left and size <= limit:
        each = left.pop()
        if isinstance(each, str):
            size += len(each)
        elif isinstance(each, Mapping):
            size += len(each)
            left += [*each.keys(), *each.values()]
        elif isinstance(each, list | tuple):
            size += len(each)
            left += each
    return size


def _template_arguments(chat: ChatOptions) -> dict[str, Any]:
    """Return the variables of the template. Templates with a thinking mode read `enable_thinking`, as under vLLM."""
    if chat.reasoning_effort is None:
        return dict(chat.chat_template_kwargs)
    effort = {"reasoning_effort": chat.reasoning_effort, "enable_thinking": chat.reasoning_effort != "none"}
    return {**effort, **chat.chat_template_kwargs}
