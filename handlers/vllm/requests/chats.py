"""Renders chats with vLLM's own renderer, and parses tool calls and reasoning out of the answers.

Only chats with a parser come here: the one of `option.tool_call_parser` or `option.reasoning_parser`, or of the chat
template, for requests with tools. Three parts are vLLM's own: its chat request, which parsers receive and may change;
`OnlineRenderer`, which validates tools and renders the messages; and the parsers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from handlers.chats.answers import AnswerFormat, NamedCallParser
from handlers.chats.answers import AnswerParser as CallParser
from handlers.chats.formats import REQUIRED, TOOL_FORMATS
from handlers.chats.required import is_forced
from handlers.chats.templates import AUTO, takes_tools, template_for_tools, tool_parser_of
from handlers.vllm import differences, library
from handlers.vllm.options import VllmEngineOptions
from lmi_server.contract.errors import RequestError
from lmi_server.contract.generation import (
    Delta,
    FinishReason,
    GenerationRequest,
    NamedTool,
    SamplingParameters,
    StructuredOutputs,
    ToolCallDelta,
)

_CONSTRAINT_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_CONSTRAINT_SETTINGS = ("whitespace_pattern", "disable_any_whitespace", "disable_additional_properties")


@dataclass(frozen=True)
class RenderedRequest:
    """A request in the form that the engine takes.

    `prompt` is vLLM's engine input: a mapping with `prompt_token_ids` and, if there is one, the text `prompt`.
    `sampling` is what the client asks for, as changed by a parser. `parser` is None if the answer is plain text.
    """

    prompt: Any
    sampling: SamplingParameters
    parser: AnswerParser | ForcedCallParser | None = None


@dataclass(frozen=True)
class ToolParser:
    """vLLM's parser of tool calls by its name; if it is None, `missing` says why requests with tools are refused."""

    name: str | None
    missing: str = ""


class ChatRenderer:
    """Renders the chats of a model, and makes the parsers of their answers."""

    def __init__(
        self,
        config: Any,
        renderer: library.BaseRenderer,
        chat_template: str | None,
        options: VllmEngineOptions,
        tools: ToolParser,
    ) -> None:
        """`config` is vLLM's configuration of the engine. Raises vLLM's own error if vLLM lacks a named parser."""
        self._options = options
        self._config = config.model_config
        self.tools = tools
        self._renderer = library.OnlineRenderer(
            config.model_config,
            renderer,
            request_logger=None,
            chat_template=chat_template,
            chat_template_content_format=options.chat_template_content_format,
            enable_auto_tools=options.lets_model_choose_tools and tools.name is not None,
            tool_parser=tools.name,
            reasoning_parser=options.reasoning_parser,
        )

    def parses(self, request: GenerationRequest) -> bool:
        """Return whether the answer of `request` goes through a parser.

        A parser that no option names is for requests with tools alone; all others take the shorter way.
        """
        named = self._options.tool_call_parser != AUTO or self._options.reasoning_parser is not None
        calls = bool(request.tools) and request.chat.tool_choice != "none"
        return self._renderer.parser is not None and (named or calls)

    def check(self, request: GenerationRequest) -> None:
        """Raise RequestError if `request` needs a parser that is not configured."""
        choice = request.chat.tool_choice
        if choice == "none":
            return
        if self.tools.name is None:
            raise RequestError(self.tools.missing)
        if choice == "auto" and not self._options.lets_model_choose_tools:
            raise RequestError('tool_choice "auto" needs option.enable_auto_tool_choice=true')

    async def render(self, request: GenerationRequest) -> RenderedRequest:
        """Return `request` in the engine's form, with a parser of its answer.

        Raises RequestError or vLLM's own error if vLLM refuses the request.
        """
        chat = library.ChatCompletionRequest.model_validate(_chat_request(request))
        rendered = await self._renderer.render_chat(chat)
        if isinstance(rendered, library.ErrorResponse):
            raise RequestError(rendered.error.message)
        (prompt,) = rendered[1]
        parser_class = self._renderer.parser
        assert parser_class is not None, "callers ask whether it parses the request"
        parser = parser_class(
            self._renderer.renderer.get_tokenizer(),
            chat.tools,
            chat_template_kwargs=differences.chat_template_kwargs(self._renderer, chat),
            model_config=self._config,
        )
        answer_parser = AnswerParser(parser, chat, self._options, request.stream)
        # Read the sampling parameters last: rendering lets the parser change `chat`, for example add a constraint.
        return RenderedRequest(prompt, _adjust_sampling(request, chat), answer_parser)


class ForcedCallParser:
    """Makes the answer of a request that has to call a tool calls: behind the reasoning, all of its text is theirs.

    `required.py` has constrained it, so that these calls have the same form for every family of models.
    """

    def __init__(self, request: GenerationRequest, family: str | None, reasoning: AnswerParser | None) -> None:
        """`family` names the form of calls of the model's family, and `reasoning` separates its reasoning."""
        self._reasoning = reasoning
        self._calls: NamedCallParser | CallParser
        if isinstance(request.chat.tool_choice, NamedTool):
            form = TOOL_FORMATS.get(family or "", REQUIRED)
            self._calls = NamedCallParser(form, request.chat.tool_choice.name)
        else:
            self._calls = CallParser(AnswerFormat.from_formats(REQUIRED, None), request, hides_special=False)

    def parse(self, delta: Delta) -> Delta:
        """Return `delta` with its text as calls."""
        content = delta if self._reasoning is None else self._reasoning.parse(delta)
        calls = self._calls.parse(content)
        return msgspec.structs.replace(calls, reasoning=content.reasoning, tokens=content.tokens)


class AnswerParser:
    """Separates the deltas of one sequence into reasoning, content and tool calls. It is stateful: one per sequence.

    vLLM's parsers have two entry points, one for the pieces of a stream and one for a whole output, and the two may
    differ in details such as whitespace. This class chooses as vLLM's own server does, by whether the client asked for
    a stream, so that both servers give the same answer.
    """

    def __init__(self, parser: Any, chat: Any, options: VllmEngineOptions, stream: bool) -> None:
        """`parser` is an instance of vLLM's parser, `chat` the ChatCompletionRequest that it was made for."""
        self._parser = parser
        self._chat = chat
        self._enable_auto_tools = options.lets_model_choose_tools
        self._counts_reasoning = options.reasoning_parser is not None
        self._stream = stream
        self._prompt_ids: list[int] = []
        self._ids: list[int] = []
        self._pieces: list[tuple[str, list[int]]] = []

    def parse(self, delta: Delta) -> Delta:
        """Return `delta` with its text separated. Without streaming only the last delta has any text."""
        ids = [token.id for token in delta.tokens]
        self._ids += ids
        if delta.prompt_token_ids is not None:
            self._prompt_ids = list(delta.prompt_token_ids)
        is_last = delta.finish_reason is not None
        if self._stream:
            parsed = self._parse_piece(delta.text, ids, is_last)
        else:
            self._pieces.append((delta.text, ids))
            parsed = self._parse_all(delta.finish_reason) if is_last else _ParsedText()
        usage = delta.usage
        if usage is not None and self._counts_reasoning:
            usage = msgspec.structs.replace(usage, reasoning_tokens=self._parser.count_reasoning_tokens(self._ids))
        # A client that asks to leave out the reasoning must not get it through the log probabilities of its tokens.
        shows_tokens = self._chat.include_reasoning
        return msgspec.structs.replace(
            delta,
            text=parsed.content,
            reasoning=parsed.reasoning,
            tool_calls=parsed.tool_calls,
            tokens=delta.tokens if shows_tokens else (),
            usage=usage,
        )

    def _parse_piece(self, text: str, ids: list[int], is_last: bool) -> _ParsedText:
        message = self._parser.parse_delta(text, ids, self._chat, prompt_token_ids=self._prompt_ids, finished=is_last)
        if message is None:
            return _ParsedText()
        tool_call_deltas = tuple(
            ToolCallDelta(
                call.index,
                call.id,
                call.function.name if call.function else None,
                call.function.arguments if call.function else None,
            )
            for call in message.tool_calls or ()
        )
        return _ParsedText(message.content or "", message.reasoning or "", tool_call_deltas)

    def _parse_all(self, reason: FinishReason | None) -> _ParsedText:
        """Parse the whole output as one, or, if it may end inside a call, as its stream.

        In a whole output vLLM's parsers look for whole calls, and take one that is cut off for content.
        """
        if reason == "eos_token" or not self._chat.tools or self._chat.tool_choice == "none":
            return self._parse_whole()
        *before, (text, ids) = self._pieces
        parsed = [self._parse_piece(*piece, is_last=False) for piece in before]
        return _join([*parsed, self._parse_piece(text, ids, is_last=True)])

    def _parse_whole(self) -> _ParsedText:
        differences.set_prompt(self._parser, self._prompt_ids)
        reasoning, content, calls = self._parser.parse(
            "".join(text for text, _ in self._pieces),
            self._chat,
            enable_auto_tools=self._enable_auto_tools,
            model_output_token_ids=self._ids,
        )
        tool_call_deltas = tuple(
            ToolCallDelta(index, call.id or differences.make_tool_call_id(), call.name, call.arguments)
            for index, call in enumerate(calls or ())
        )
        return _ParsedText(content or "", (reasoning or "") if self._chat.include_reasoning else "", tool_call_deltas)


@dataclass(frozen=True)
class _ParsedText:
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


def _join(pieces: Sequence[_ParsedText]) -> _ParsedText:
    return _ParsedText(
        "".join(piece.content for piece in pieces),
        "".join(piece.reasoning for piece in pieces),
        tuple(call for piece in pieces for call in piece.tool_calls),
    )


def tool_parser(tokenizer: Any, template: str | None, options: VllmEngineOptions) -> ToolParser:
    """Return the parser of tool calls by the options, or by the chat template."""
    if options.tool_call_parser != AUTO:
        return ToolParser(options.tool_call_parser)
    source = "the model's chat template" if options.chat_template is None else "option.chat_template"
    template = template or template_for_tools(getattr(tokenizer, "chat_template", None)) or ""
    if not takes_tools(template):
        remedy = "set option.chat_template to one that renders them, or leave out tools"
        return ToolParser(None, f"{source} takes no tools; {remedy}")
    missing = f"{source} teaches no form of calls that is known; set option.tool_call_parser to a parser of vLLM"
    return ToolParser(tool_parser_of(template), missing)


def _chat_request(request: GenerationRequest) -> dict[str, Any]:
    """Return the body of a chat request with the fields that vLLM's renderer and parsers read."""
    chat, sampling = request.chat, request.sampling
    body = {
        "messages": [dict(message) for message in request.messages or ()],
        "tools": [dict(tool) for tool in request.tools] if request.tools else None,
        # vLLM would constrain a forced call in its own ways; `ForcedCallParser` reads those of `required.py`.
        "tool_choice": "none" if is_forced(request) else chat.tool_choice,
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


def _adjust_sampling(request: GenerationRequest, chat: Any) -> SamplingParameters:
    """Return the sampling parameters of `request` with what the renderer and the parser changed in `chat`.

    They change two things: the constraint on the output (the schema of a required tool), and whether special tokens
    stay in the text, where some parsers look for them.
    """
    constraint, budget = chat.extract_structured_outputs(), request.chat.thinking_token_budget
    thinking = {} if budget is None else {"thinking_token_budget": budget}
    return msgspec.structs.replace(
        request.sampling,
        extra={**request.sampling.extra, **thinking},
        skip_special_tokens=chat.skip_special_tokens,
        spaces_between_special_tokens=chat.spaces_between_special_tokens,
        structured_outputs=None if constraint is None else _constraint(constraint),
    )


def _constraint(parameters: Any) -> StructuredOutputs:
    """Return vLLM's StructuredOutputsParams in this project's form."""
    kind: Any = next(kind for kind in _CONSTRAINT_KINDS if getattr(parameters, kind) is not None)
    settings: dict[str, Any] = {name: getattr(parameters, name) for name in _CONSTRAINT_SETTINGS}
    return StructuredOutputs(kind=kind, value=getattr(parameters, kind), **settings)
