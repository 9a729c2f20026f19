"""What a loaded model can do in chats: which tools its template takes, and how its answers are parsed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from handlers.chats.answers import AnswerFormat, AnswerParser, NamedCallParser
from handlers.chats.formats import REASONING_FORMATS, REQUIRED, TOOL_FORMATS
from handlers.chats.options import PARSER_KEY, ParserOptions, choice_in_words
from handlers.chats.required import call_constraint
from handlers.chats.templates import AUTO, TOOL_PARSERS, takes_tools, template_for_tools, tool_parser_of
from lmi_server.contract.errors import RequestError
from lmi_server.contract.generation import GenerationRequest, NamedTool


@dataclass(frozen=True)
class ChatRequest:
    """A request as the engine takes it, and the parser of its answer."""

    request: GenerationRequest
    parser: AnswerParser | NamedCallParser


class ModelChats:
    """The tools and the reasoning of a loaded model."""

    def __init__(self, tokenizer: Any, options: ParserOptions) -> None:
        template = template_for_tools(tokenizer.chat_template) or ""
        self._has_template = bool(template)
        self._source = "option.chat_template" if options.chat_template is not None else "the model's chat template"
        self._takes_tools = takes_tools(template)
        self._auto = options.enable_auto_tool_choice
        chosen = tool_parser_of(template) if options.tool_call_parser == AUTO else options.tool_call_parser
        self._unknown = "" if chosen in TOOL_PARSERS else (chosen or "unknown")
        self._tools = TOOL_FORMATS.get(chosen or "")
        reasoning = None if options.reasoning_parser is None else REASONING_FORMATS[options.reasoning_parser]
        self._plain = AnswerFormat.from_formats(None, reasoning) if reasoning is not None else None
        self._with_tools = AnswerFormat.from_formats(self._tools, reasoning)
        self._required = AnswerFormat.from_formats(REQUIRED, None)
        self._needs_special = _has_special_token(tokenizer, self._with_tools)
        named = options.tool_call_parser
        self.details: Mapping[str, str] = {
            "tool_call_parser": choice_in_words(template) if named == AUTO else named,
            "reasoning_parser": options.reasoning_parser or "none",
        }

    def concern(self, request: GenerationRequest) -> bool:
        """Return whether the answer has anything but text."""
        calls = request.tools and request.chat.tool_choice != "none"
        return request.messages is not None and bool(calls or self._plain is not None)

    def prepare(self, request: GenerationRequest) -> ChatRequest:
        """Return a request that they concern, with the parser of its answer.

        Raises RequestError if the model cannot take its tools.
        """
        choice = request.chat.tool_choice
        if not request.tools or choice == "none":
            assert self._plain is not None
            return self._freely(request, self._plain)
        self._check(request)
        if isinstance(choice, NamedTool):
            return ChatRequest(call_constraint(request), NamedCallParser(self._tools or REQUIRED, choice.name))
        if choice == "required":
            return ChatRequest(call_constraint(request), AnswerParser(self._required, request, hides_special=False))
        return self._freely(request, self._with_tools)

    def _freely(self, request: GenerationRequest, form: AnswerFormat) -> ChatRequest:
        """Return `request` with a parser that looks for the markers of the model's family."""
        sampling = request.sampling
        hides = self._needs_special and sampling.skip_special_tokens
        if hides:
            sampling = msgspec.structs.replace(sampling, skip_special_tokens=False)
            request = msgspec.structs.replace(request, sampling=sampling)
        return ChatRequest(request, AnswerParser(form, request, hides))

    def _check(self, request: GenerationRequest) -> None:
        if not self._has_template:  # the prompt's encoder refuses the chat, and says so
            return
        if not self._takes_tools:
            raise RequestError(
                f"{self._source} takes no tools; leave out tools, or set option.chat_template to a template that"
                " renders them"
            )
        if request.chat.tool_choice != "auto":
            return
        if not self._auto:
            raise RequestError('tool_choice "auto" needs option.enable_auto_tool_choice=true; send required, or none')
        if self._tools is None:
            form = "a form that is not known" if self._unknown == "unknown" else f"the form {self._unknown}"
            raise RequestError(
                f"{self._source} teaches calls in {form}; set {PARSER_KEY} to one of {', '.join(TOOL_PARSERS)}, or"
                " option.rolling_batch=vllm, which has further parsers"
            )


def _has_special_token(tokenizer: Any, form: AnswerFormat) -> bool:
    """Return whether a marker of the form is a special token, which a text does not show without being asked."""
    tools, reasoning = form.tools, form.reasoning
    texts = [] if tools is None else [tools.text]
    texts += [] if reasoning is None else [reasoning.begin, reasoning.end]
    return any(token in text for token in tokenizer.all_special_tokens for text in texts)
