"""Chats whose answers hold tool calls or reasoning: rendered and read by vLLM's own renderer and parsers.

Taken from vLLM: its chat request (what its parsers are handed, and may change), `OnlineRenderer`, which checks tools
and renders the messages, and the parsers that `option.tool_call_parser` and `option.reasoning_parser` name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from handlers.vllm import library
from handlers.vllm.options import VllmEngineOptions
from lmi_server.contract.errors import RequestError
from lmi_server.contract.generation import (
    Delta,
    GenerationRequest,
    NamedTool,
    SamplingParameters,
    StructuredOutputs,
    ToolCallDelta,
)

_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_MANNERS = ("whitespace_pattern", "disable_any_whitespace", "disable_additional_properties")


@dataclass(frozen=True)
class Rendered:
    """A request as the engine takes it.

    `prompt` is vLLM's engine input: a mapping with `prompt_token_ids` and, where there is one, the text `prompt`.
    `sampling` is what the request asks for, as the parsers of its answer want it; `reading` is None where nothing is
    read out of the answer.
    """

    prompt: Any
    sampling: SamplingParameters
    reading: Reading | None = None


class ParsedChats:
    """Renders chats and reads their answers where a parser is configured."""

    def __init__(
        self, config: Any, renderer: library.BaseRenderer, chat_template: str | None, options: VllmEngineOptions
    ) -> None:
        """Raise what vLLM raises where it knows no such parser."""
        self._options = options
        self._config = config.model_config
        self._renderer = library.OnlineRenderer(
            config.model_config,
            renderer,
            request_logger=None,
            chat_template=chat_template,
            chat_template_content_format=options.chat_template_content_format,
            enable_auto_tools=options.enable_auto_tool_choice,
            tool_parser=options.tool_call_parser,
            reasoning_parser=options.reasoning_parser,
        )

    @property
    def parses(self) -> bool:
        """Whether any parser is configured."""
        return self._renderer.parser is not None

    def check(self, request: GenerationRequest) -> None:
        """Raise RequestError where the tools of `request` need an option that is not set."""
        choice = request.chat.tool_choice
        if request.chat.thinking_token_budget is not None and self._options.reasoning_parser is None:
            raise RequestError(
                "thinking_token_budget needs a parser of the model's reasoning; set option.reasoning_parser"
            )
        if choice == "none":
            return
        if self._options.tool_call_parser is None:
            raise RequestError("tools need a parser of the model's tool calls; set option.tool_call_parser")
        if choice == "auto" and not self._options.enable_auto_tool_choice:
            raise RequestError('tool_choice "auto" needs option.enable_auto_tool_choice=true')

    async def render(self, request: GenerationRequest) -> Rendered:
        """Return what the engine is to be given for `request`.

        Raises RequestError or vLLM's own error where the request cannot be served.
        """
        asked = library.ChatCompletionRequest.model_validate(_chat_request(request))
        rendered = await self._renderer.render_chat(asked)
        if isinstance(rendered, library.ErrorResponse):
            raise RequestError(rendered.error.message)
        (prompt,) = rendered[1]
        parser_class = self._renderer.parser
        assert parser_class is not None, "asked for only where one is configured"
        parser = parser_class(
            self._renderer.renderer.get_tokenizer(),
            asked.tools,
            chat_template_kwargs=self._renderer.effective_chat_template_kwargs(asked),
            model_config=self._config,
        )
        reading = Reading(parser, asked, self._options, request.stream)
        return Rendered(prompt, _adjusted(request, asked), reading)


class Reading:
    """Reads reasoning, content and tool calls out of the deltas of one sequence."""

    def __init__(self, parser: Any, asked: Any, options: VllmEngineOptions, stream: bool) -> None:
        self._parser = parser
        self._asked = asked
        self._auto = options.enable_auto_tool_choice
        self._counts_reasoning = options.reasoning_parser is not None
        self._stream = stream
        self._prompt_ids: list[int] = []
        self._ids: list[int] = []
        self._texts: list[str] = []

    def read(self, delta: Delta) -> Delta:
        """Return `delta` with its text told apart. A parser that sees the whole output at once tells it at the end."""
        ids = [token.id for token in delta.tokens]
        self._ids += ids
        if delta.prompt_token_ids is not None:
            self._prompt_ids = list(delta.prompt_token_ids)
        ends = delta.finish_reason is not None
        if self._stream:
            read = self._read_piece(delta.text, ids, ends)
        else:
            self._texts.append(delta.text)
            read = self._read_whole() if ends else _Read()
        usage = delta.usage
        if usage is not None and self._counts_reasoning:
            usage = msgspec.structs.replace(usage, reasoning_tokens=self._parser.count_reasoning_tokens(self._ids))
        shows_tokens = self._asked.include_reasoning  # else their log probabilities would tell what is hidden
        return msgspec.structs.replace(
            delta,
            text=read.content,
            reasoning=read.reasoning,
            tool_calls=read.calls,
            tokens=delta.tokens if shows_tokens else (),
            usage=usage,
        )

    def _read_piece(self, text: str, ids: list[int], ends: bool) -> _Read:
        message = self._parser.parse_delta(text, ids, self._asked, prompt_token_ids=self._prompt_ids, finished=ends)
        if message is None:
            return _Read()
        calls = tuple(
            ToolCallDelta(
                call.index,
                call.id,
                call.function.name if call.function else None,
                call.function.arguments if call.function else None,
            )
            for call in message.tool_calls or ()
        )
        return _Read(message.content or "", message.reasoning or "", calls)

    def _read_whole(self) -> _Read:
        self._parser.set_prompt_token_ids(self._prompt_ids)
        reasoning, content, calls = self._parser.parse(
            "".join(self._texts), self._asked, enable_auto_tools=self._auto, model_output_token_ids=self._ids
        )
        told = tuple(
            ToolCallDelta(index, call.id or library.make_tool_call_id(), call.name, call.arguments)
            for index, call in enumerate(calls or ())
        )
        return _Read(content or "", (reasoning or "") if self._asked.include_reasoning else "", told)


@dataclass(frozen=True)
class _Read:
    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCallDelta, ...] = ()


def _chat_request(request: GenerationRequest) -> dict[str, Any]:
    """Return what of `request` vLLM's renderer and parsers look at, as the body of a chat request."""
    chat, sampling = request.chat, request.sampling
    choice = chat.tool_choice
    body = {
        "messages": [dict(message) for message in request.messages or ()],
        "tools": [dict(tool) for tool in request.tools] if request.tools else None,
        "tool_choice": {"type": "function", "function": {"name": choice.name}}
        if isinstance(choice, NamedTool)
        else choice,
        "parallel_tool_calls": chat.parallel_tool_calls,
        "chat_template_kwargs": dict(chat.chat_template_kwargs) or None,
        "documents": chat.documents,
        "add_generation_prompt": chat.add_generation_prompt,
        "continue_final_message": chat.continue_final_message,
        "reasoning_effort": chat.reasoning_effort,
        "include_reasoning": chat.include_reasoning,
        "add_special_tokens": request.add_special_tokens,
        "stream": request.stream,
        "max_completion_tokens": sampling.max_new_tokens,
        "truncate_prompt_tokens": sampling.truncate,
        "skip_special_tokens": sampling.skip_special_tokens,
        "spaces_between_special_tokens": sampling.spaces_between_special_tokens,
        "structured_outputs": sampling.structured_outputs and library.structured_outputs(sampling.structured_outputs),
    }
    return {name: value for name, value in body.items() if value is not None}


def _adjusted(request: GenerationRequest, asked: Any) -> SamplingParameters:
    """Return the sampling with what a parser has changed in it: the constraint, and how tokens are decoded."""
    constraint, budget = asked.extract_structured_outputs(), request.chat.thinking_token_budget
    thinking = {} if budget is None else {"thinking_token_budget": budget}
    return msgspec.structs.replace(
        request.sampling,
        extra={**request.sampling.extra, **thinking},
        skip_special_tokens=asked.skip_special_tokens,
        spaces_between_special_tokens=asked.spaces_between_special_tokens,
        structured_outputs=None if constraint is None else _constraint(constraint),
    )


def _constraint(found: Any) -> StructuredOutputs:
    kind: Any = next(kind for kind in _KINDS if getattr(found, kind) is not None)
    manners: dict[str, Any] = {name: getattr(found, name) for name in _MANNERS}
    return StructuredOutputs(kind=kind, value=getattr(found, kind), **manners)
