"""Turns the prompt of a generation request into token ids, with the tokenizer and its chat template."""

from __future__ import annotations

import asyncio
import functools
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jinja2 import TemplateError

from handlers.chats.messages import needs_text, template_messages, with_known_roles
from handlers.checkpoints.text_length import LONG_TEXT_CHARS, TextLength
from lmi_server.contract.errors import ContextLengthError, RequestError
from lmi_server.contract.generation import ChatOptions, GenerationRequest

_MANY_MESSAGES = 64
_NICENESS = 10  # of that thread: what runs has the first claim on the cores


class PromptEncoder:
    """Encodes prompts of any form: token ids, text or messages."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._length = TextLength(tokenizer)
        # One thread for each, so that any number of long prompts takes one core at most. The thread that gives way to
        # others must hardly ever have the GIL: whoever waits for that would wait as long as others have the cores.
        self._thread = ThreadPoolExecutor(1, "tokenize", initializer=_yield_to_others)
        self._python_thread = ThreadPoolExecutor(1, "prompts")
        # transformers' wrapper sets truncation and padding of the backend in every call, which fails while another
        # thread decodes with it. Calling the backend itself, with both switched off once, is safe from any thread.
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        if self._backend is not None:
            self._backend.no_truncation()
            self._backend.no_padding()

    @property
    def tokenizer(self) -> Any:
        return self._tokenizer

    async def encode(self, request: GenerationRequest, limit: int = 0) -> tuple[list[int], str]:
        """Return the token ids and the text of the request's prompt.

        Raises RequestError if the chat cannot be rendered, ContextLengthError if a long prompt has `limit` tokens or
        more (0: any number).
        """
        truncate = request.sampling.truncate
        if isinstance(request.prompt, tuple):
            ids = list(request.prompt[-truncate:] if truncate else request.prompt)
            if 0 < limit <= len(ids):
                raise ContextLengthError.of(len(ids), 0, limit)
            return ids, self._tokenizer.decode(ids)
        text = await self._text(request)
        if not truncate:
            self._length.check(text, limit)
        # A long text would block the event loop. A short one is not worth the change of threads.
        special = request.add_special_tokens and request.prompt is not None  # a chat template writes them itself
        if len(text) > LONG_TEXT_CHARS:
            ids = await self._tokenize_long(text, special, 0 if truncate else limit)
        else:
            ids = self.tokenize(text, special)
        return (ids[-truncate:], text) if truncate else (ids, text)

    async def _text(self, request: GenerationRequest) -> str:
        if isinstance(request.prompt, str):
            return request.prompt
        if len(request.messages or ()) < _MANY_MESSAGES:
            return self._render(request)
        return await asyncio.get_running_loop().run_in_executor(self._python_thread, self._render, request)

    async def _tokenize_long(self, text: str, add_special_tokens: bool, limit: int) -> list[int]:
        """Do what `tokenize` does beside the event loop, and without the GIL: `encode` would keep that to the end.

        The list of ids takes milliseconds for each 100,000 with the GIL. So it is not made in the thread that gives way
        to others, and not at all for a prompt that is refused. Raises ContextLengthError as `encode`.
        """
        run = asyncio.get_running_loop().run_in_executor
        if self._backend is None:
            return await run(self._python_thread, self.tokenize, text, add_special_tokens)
        encode = functools.partial(self._backend.encode_batch_fast, [text], add_special_tokens=add_special_tokens)
        encodings = await run(self._thread, encode)
        if 0 < limit <= len(encodings[0]):
            raise ContextLengthError.of(len(encodings[0]), 0, limit)
        ids: list[int] = encodings[0].ids
        return ids

    def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`."""
        ids: list[int]
        if self._backend is not None:
            ids = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        else:
            ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return ids

    def detokenize(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids, special ones included. Raises RequestError if one is not in the vocabulary."""
        vocabulary = len(self._tokenizer)
        unknown = [token for token in tokens if not 0 <= token < vocabulary]
        if unknown:
            raise RequestError(f"token id {unknown[0]} is not in the vocabulary of {vocabulary} tokens")
        return str(self._tokenizer.decode(list(tokens)))

    def _render(self, request: GenerationRequest) -> str:
        if not self._tokenizer.chat_template:
            raise RequestError(
                "the model's tokenizer has no chat template, so `messages` cannot be served; send `prompt` or `inputs`,"
                " or put a chat_template.jinja into the model directory"
            )
        chat = request.chat
        messages = with_known_roles(request.messages or (), self._tokenizer.chat_template)
        try:
            text: str = self._tokenizer.apply_chat_template(
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
    def _arguments_as_text(self) -> bool:
        """Return whether the template needs the arguments of calls as text; found out when the first call comes."""
        return needs_text(
            lambda messages, tools: self._tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
        )


def _yield_to_others() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


def _template_arguments(chat: ChatOptions) -> dict[str, Any]:
    """Return the variables of the template. Templates with a thinking mode read `enable_thinking`, as under vLLM."""
    if chat.reasoning_effort is None:
        return dict(chat.chat_template_kwargs)
    effort = {"reasoning_effort": chat.reasoning_effort, "enable_thinking": chat.reasoning_effort != "none"}
    return {**effort, **chat.chat_template_kwargs}
