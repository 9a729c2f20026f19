"""Turns a generation request into what vLLM takes: a rendered prompt and sampling parameters."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jinja2 import TemplateError
from pydantic import ValidationError

from handlers.chats.required import is_forced
from handlers.checkpoints.text_length import LONG_TEXT_CHARS, TextLength
from handlers.generation.parameters import max_new_tokens, warn_of_typical_p
from handlers.vllm import differences, library
from handlers.vllm.requests.chats import ChatRenderer, ForcedCallParser, RenderedRequest
from lmi_server.contract.errors import ContextLengthError, PayloadTooLargeError, RequestError
from lmi_server.contract.generation import GenerationRequest, SamplingParameters
from lmi_server.media.budget import media_of_request

MEDIA_SIZE = "max_media_size"
"""The parameter of the error for media that take too much."""
_CACHE_SALT = "cache_salt"  # part of vLLM's prompt, not of its sampling parameters
# Tokens per output of a request whose answer does not stream. Each output costs a pass through the handler and the
# link, so there should be few. There must be some, because the queue gives up a request that shows no progress.
_UNSTREAMED_INTERVAL = 32
# Parameters that vLLM has under the same names.
_SAME_NAMES = (
    *("top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "ignore_eos"),
    *("include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens", "min_tokens"),
    *("logprobs", "prompt_logprobs"),
)
# The errors of vLLM for an impossible request: the client gets the error, and the engine goes on.
CLIENT_ERRORS = (library.VLLMClientError, ValueError, TypeError, NotImplementedError, TemplateError)


class PromptRenderer:
    """Renders prompts with vLLM's own renderer: tokenizer, chat template, images and other media."""

    def __init__(
        self,
        renderer: library.BaseRenderer,
        max_model_len: int,
        chat_template: str | None,
        content_format: str,
        chats: ChatRenderer,
    ) -> None:
        self._renderer = renderer
        self._max_model_len = max_model_len
        self._chat_template = chat_template
        self._content_format = content_format
        self._chats = chats
        self._length = TextLength(renderer.get_tokenizer())
        self._thread = ThreadPoolExecutor(1, "texts")

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, as vLLM loaded it."""
        return self._renderer.get_tokenizer()

    async def render(self, request: GenerationRequest) -> RenderedRequest:
        """Return `request` in the engine's form.

        Raises ContextLengthError or RequestError if vLLM cannot render it.
        """
        try:
            with media_of_request():
                rendered = await self._render(request)
        except CLIENT_ERRORS as error:
            raise as_request_error(error, self._max_model_len) from error
        salt = request.sampling.extra.get(_CACHE_SALT)
        if salt is not None:
            rendered.prompt[_CACHE_SALT] = salt
        return rendered

    async def _render(self, request: GenerationRequest) -> RenderedRequest:
        if request.messages is None:
            return RenderedRequest(await self._render_text(request), request.sampling)
        self._chats.check(request)
        if self._chats.parses(request):
            rendered = await self._chats.render(request)
        else:
            rendered = RenderedRequest(await self._render_chat(request), request.sampling)
        if not is_forced(request):
            return rendered
        assert not isinstance(rendered.parser, ForcedCallParser)
        parser = ForcedCallParser(request, self._chats.tools.name, rendered.parser)
        return dataclasses.replace(rendered, parser=parser)

    async def detokenize(self, ids: list[int]) -> str:
        """Return the text of token ids, with special tokens. Raises RequestError if the vocabulary lacks one."""
        try:
            differences.validate_token_ids(self._renderer, ids)
        except library.VLLMClientError as error:
            raise as_request_error(error) from error
        if len(ids) <= LONG_TEXT_CHARS:
            return str(self.tokenizer.decode(ids))
        return str(await asyncio.get_running_loop().run_in_executor(self._thread, self.tokenizer.decode, ids))

    async def _render_text(self, request: GenerationRequest) -> Any:
        if isinstance(request.prompt, str):
            self._length.check_size(len(request.prompt), self._max_model_len)
            prompt: dict[str, Any] = {"prompt": request.prompt}
        else:
            prompt = {"prompt_token_ids": list(request.prompt or ())}
        parameters = self._tokenize_params(request, request.add_special_tokens)
        if len(request.prompt or ()) > LONG_TEXT_CHARS:
            return (await self._renderer.render_cmpl_async([prompt], parameters))[0]
        return self._renderer.render_cmpl([prompt], parameters)[0]

    async def _render_chat(self, request: GenerationRequest) -> Any:
        options = request.chat
        arguments = {
            "add_generation_prompt": options.add_generation_prompt,
            "continue_final_message": options.continue_final_message,
            "documents": options.documents,
            "reasoning_effort": options.reasoning_effort,
            "tools": list(request.tools) if request.tools else None,
        }
        chat = library.ChatParams(
            chat_template=self._chat_template,
            chat_template_content_format=self._content_format,
            chat_template_kwargs={
                **options.chat_template_kwargs,
                **{k: v for k, v in arguments.items() if v is not None},
            },
        )
        messages = [dict(message) for message in request.messages or ()]
        # No special tokens: the chat template writes its own.
        rendered = await self._renderer.render_chat_async(
            [messages], chat, self._tokenize_params(request, add_special_tokens=False)
        )
        return rendered[1][0]

    def _tokenize_params(self, request: GenerationRequest, add_special_tokens: bool) -> library.TokenizeParams:
        return library.TokenizeParams(
            max_total_tokens=self._max_model_len,
            truncate_prompt_tokens=request.sampling.truncate,
            truncation_side="left" if request.sampling.truncate else None,
            add_special_tokens=add_special_tokens,
            max_total_tokens_param="max_model_len",
        )


def sampling_params(
    sampling: SamplingParameters, stream: bool, prompt_len: int, max_model_len: int
) -> library.SamplingParams:
    """Return `sampling` in vLLM's form; unless `stream`, vLLM then collects several tokens in an output.

    `prompt_len` and `max_model_len` are in tokens. Raises ContextLengthError if the prompt and the new tokens do not
    fit into the context, RequestError if vLLM refuses a value.
    """
    if sampling.typical_p != 1.0:
        warn_of_typical_p("vLLM")
    max_tokens = max_new_tokens(sampling, prompt_len, max_model_len)
    try:
        return library.SamplingParams(
            **{name: getattr(sampling, name) for name in _SAME_NAMES},
            temperature=0.0 if sampling.greedy else sampling.temperature,
            logit_bias=dict(sampling.logit_bias) or None,
            bad_words=list(sampling.bad_words),
            allowed_token_ids=None if sampling.allowed_token_ids is None else list(sampling.allowed_token_ids),
            structured_outputs=sampling.structured_outputs and library.structured_outputs(sampling.structured_outputs),
            stop=list(sampling.stop),
            stop_token_ids=list(sampling.stop_token_ids),
            max_tokens=max_tokens,
            output_kind=library.RequestOutputKind.DELTA,
            stream_interval=None if stream else _UNSTREAMED_INTERVAL,
            skip_clone=True,  # the object is made for this request alone
            **_extra(sampling.extra),
        )
    except CLIENT_ERRORS as error:
        raise as_request_error(error) from error


def _extra(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters that only vLLM knows, as arguments of SamplingParams.

    A request to vLLM's server has some of them at its top level that SamplingParams takes in `extra_args`.
    """
    extra = {name: value for name, value in parameters.items() if name != _CACHE_SALT}
    arguments = dict(extra.pop("vllm_xargs", {}))
    arguments |= {name: extra.pop(name) for name in ("kv_transfer_params", "ec_transfer_params") if name in extra}
    if arguments:
        extra["extra_args"] = arguments
    if "repetition_detection" in extra:
        extra["repetition_detection"] = library.RepetitionDetectionParams(**extra["repetition_detection"])
    return extra


def as_request_error(error: Exception, max_model_len: int = 0) -> RequestError:
    """Return the error for the client, of what vLLM raised for its request."""
    # The text of a VLLMClientError also repeats the parameter and its value; its first argument is the message alone.
    message = str(error.args[0]) if isinstance(error, library.VLLMClientError) and error.args else error_message(error)
    match getattr(error, "parameter", None):
        case "input_tokens":
            return ContextLengthError(message, int(getattr(error, "value", 0)), 0, max_model_len)
        case name if name == MEDIA_SIZE:
            return PayloadTooLargeError(message)
        case "input_text":  # so long that vLLM does not count its tokens
            return ContextLengthError(message)
    return RequestError(message)


_FIELD = re.compile(r"(?!(?:int|float|str|bool)$)[a-z][a-z0-9_]*")  # not the type that a form of the value has


def _problem(detail: Mapping[str, Any]) -> str:
    """Return pydantic's message about one value, and its place. Names of types in the place are left out."""
    place = ".".join(str(part) for part in detail["loc"] if isinstance(part, int) or _FIELD.fullmatch(part))
    text = str(detail["msg"]).removeprefix("Value error, ")
    return f"{place}: {text}" if place else text


def error_message(error: BaseException) -> str:
    """Return the message of an error, without the header and the links that pydantic adds, with each place."""
    if isinstance(error, ValidationError):
        return "; ".join(dict.fromkeys(map(_problem, error.errors())))
    return str(error) or type(error).__name__
