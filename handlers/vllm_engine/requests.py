"""From a generation request to what vLLM takes: a rendered prompt and sampling parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError

from handlers.vllm_engine import library
from handlers.vllm_options import VllmOptions
from lmi_server.errors import ContextLengthError, RequestError
from lmi_server.generation import GenerationRequest, SamplingParameters

_LONG_TEXT = 20_000  # characters from which tokenizing would hold up the event loop for milliseconds
CLIENT_ERRORS = (library.VLLMClientError, ValueError, TypeError, NotImplementedError, TemplateError)


class PromptRenderer:
    """Renders prompts with vLLM's own renderer: tokenizer, chat template, parts that are no text."""

    def __init__(self, renderer: library.BaseRenderer, max_model_len: int, options: VllmOptions) -> None:
        self._renderer = renderer
        self._max_model_len = max_model_len
        self._chat_template = options.chat_template
        self._content_format = options.chat_template_content_format

    async def render(self, request: GenerationRequest) -> Any:
        """Return vLLM's engine input: a mapping with `prompt_token_ids` and, where there is one, the text `prompt`.

        Raises ContextLengthError or RequestError where the request cannot be rendered.
        """
        try:
            if request.messages is not None:
                return await self._chat(request)
            return await self._text(request)
        except CLIENT_ERRORS as error:
            raise as_request_error(error) from error

    def detokenize(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids, special ones too. Raises RequestError where one is not in the vocabulary."""
        tokenizer = self._renderer.get_tokenizer()
        unknown = [token for token in tokens if not 0 <= token <= tokenizer.max_token_id]
        if unknown:
            raise RequestError(f"token id {unknown[0]} is not in the vocabulary of {tokenizer.max_token_id + 1} tokens")
        return tokenizer.decode(list(tokens))

    async def _text(self, request: GenerationRequest) -> Any:
        if isinstance(request.prompt, str):
            prompt: dict[str, Any] = {"prompt": request.prompt}
        else:
            prompt = {"prompt_token_ids": list(request.prompt or ())}
        parameters = self._tokenizing(request, request.add_special_tokens)
        if len(request.prompt or ()) > _LONG_TEXT:
            return (await self._renderer.render_cmpl_async([prompt], parameters))[0]
        return self._renderer.render_cmpl([prompt], parameters)[0]

    async def _chat(self, request: GenerationRequest) -> Any:
        chat = library.ChatParams(
            chat_template=self._chat_template,
            chat_template_content_format=self._content_format,
            chat_template_kwargs={
                "add_generation_prompt": True,
                "tools": list(request.tools) if request.tools else None,
            },
        )
        messages = [dict(message) for message in request.messages or ()]
        # A template writes its special tokens itself.
        rendered = await self._renderer.render_chat_async([messages], chat, self._tokenizing(request, False))
        return rendered[1][0]

    def _tokenizing(self, request: GenerationRequest, add_special_tokens: bool) -> library.TokenizeParams:
        return library.TokenizeParams(
            max_total_tokens=self._max_model_len,
            truncate_prompt_tokens=request.sampling.truncate,
            truncation_side="left" if request.sampling.truncate else None,
            add_special_tokens=add_special_tokens,
            max_total_tokens_param="max_model_len",
        )


def sampling_params(sampling: SamplingParameters, prompt_len: int, max_model_len: int) -> library.SamplingParams:
    """Return `sampling` in vLLM's form.

    Raises ContextLengthError where prompt and new tokens do not fit, RequestError where vLLM refuses a value.
    """
    if sampling.typical_p != 1.0:
        raise RequestError("typical_p is not supported by vLLM; leave it out or send 1.0")
    room = max_model_len - prompt_len
    wanted = sampling.max_new_tokens if sampling.max_new_tokens is not None else max(room, 1)
    if wanted > room:
        raise ContextLengthError(
            f"the prompt has {prompt_len} tokens and max_new_tokens is {wanted}, but the model's context holds"
            f" {max_model_len}; shorten the prompt or lower max_new_tokens to {max(room, 0)} at most"
        )
    try:
        return library.SamplingParams(
            temperature=0.0 if sampling.greedy else sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            logit_bias=dict(sampling.logit_bias) or None,
            seed=sampling.seed,
            stop=list(sampling.stop),
            stop_token_ids=list(sampling.stop_token_ids),
            include_stop_str_in_output=sampling.include_stop_str_in_output,
            ignore_eos=sampling.ignore_eos,
            skip_special_tokens=sampling.skip_special_tokens,
            max_tokens=wanted,
            logprobs=sampling.logprobs,
            prompt_logprobs=(sampling.logprobs or 0) if sampling.prompt_logprobs else None,
            output_kind=library.RequestOutputKind.DELTA,
            skip_clone=True,
        )
    except CLIENT_ERRORS as error:
        raise as_request_error(error) from error


def as_request_error(error: Exception) -> RequestError:
    """Return what the client is told of an error that vLLM raised for its request."""
    message = str(error.args[0]) if isinstance(error, library.VLLMClientError) and error.args else str(error)
    if getattr(error, "parameter", None) in ("input_tokens", "input_text"):
        return ContextLengthError(message)
    return RequestError(message or type(error).__name__)
