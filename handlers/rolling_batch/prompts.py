"""Turns the prompt of a generation request into token ids, with the tokenizer and its chat template."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError

from handlers.chats.messages import needs_text, template_messages
from lmi_server.contract.errors import RequestError
from lmi_server.contract.generation import ChatOptions, GenerationRequest

# From this many characters on a prompt is tokenized in another thread: it would block the event loop for milliseconds.
# A shorter prompt is not worth the change of threads.
LONG_TEXT_CHARS = 20_000


class PromptEncoder:
    """Encodes prompts of any form: token ids, text or messages."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # transformers' wrapper sets truncation and padding of the backend in every call, which fails while another
        # thread decodes with it. Calling the backend itself, with both switched off once, is safe from any thread.
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        if self._backend is not None:
            self._backend.no_truncation()
            self._backend.no_padding()

    @property
    def tokenizer(self) -> Any:
        return self._tokenizer

    async def encode(self, request: GenerationRequest) -> tuple[list[int], str]:
        """Return the token ids and the text of the request's prompt.

        Raises RequestError if the chat cannot be rendered.
        """
        if isinstance(request.prompt, tuple):
            ids = list(request.prompt)
            text = self._tokenizer.decode(ids)
        else:
            chat = request.prompt is None
            text = self._render(request) if request.prompt is None else request.prompt
            special = request.add_special_tokens and not chat  # a chat template writes the special tokens itself
            ids = (
                await asyncio.to_thread(self.tokenize, text, special)
                if len(text) > LONG_TEXT_CHARS
                else self.tokenize(text, special)
            )
        truncate = request.sampling.truncate
        return (ids[-truncate:], text) if truncate else (ids, text)

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
        try:
            text: str = self._tokenizer.apply_chat_template(
                template_messages(request.messages or (), self._arguments_as_text),
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


def _template_arguments(chat: ChatOptions) -> dict[str, Any]:
    """Return the variables of the template. Templates with a thinking mode read `enable_thinking`, as under vLLM."""
    if chat.reasoning_effort is None:
        return dict(chat.chat_template_kwargs)
    effort = {"reasoning_effort": chat.reasoning_effort, "enable_thinking": chat.reasoning_effort != "none"}
    return {**effort, **chat.chat_template_kwargs}
