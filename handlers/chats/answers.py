"""Separates the answer of a chat into reasoning, content and calls of tools.

transformers' `ResponseParser` finds the markers in the text as it comes, and holds back what may become one. It takes
a response template, which is made here from the formats of the model's family.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import regex
from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.response_templates import ResponseTemplate, load_response_template

from handlers.chats.calls import CallPiece, CallReader, is_object
from handlers.chats.formats import ReasoningFormat, ToolFormat
from lmi_server.contract.generation import Delta, FinishReason, GenerationRequest, ToolCallDelta

_CALLS, _REASONING, _CONTENT, _DROPPED = "tool_calls", "thinking", "content", "marker"
_LONGEST_TAIL = 200  # characters of a prompt in which the beginning of the reasoning is looked for


@dataclass(frozen=True)
class AnswerFormat:
    """How one kind of answer of a model is written; `template` is `response_template` of the other two."""

    tools: ToolFormat | None
    reasoning: ReasoningFormat | None
    template: ResponseTemplate

    @classmethod
    def from_formats(cls, tools: ToolFormat | None, reasoning: ReasoningFormat | None) -> AnswerFormat:
        return cls(tools, reasoning, response_template(tools, reasoning))

    def prefix(self, prompt: str) -> str:
        """Return the text that the parser reads before the answer: the first marker if the prompt ends in reasoning."""
        if self.reasoning is None:
            return ""
        tail = prompt[-_LONGEST_TAIL:].rstrip()
        if tail.endswith(self.reasoning.begin):
            return self.reasoning.begin
        return self.reasoning.begin if self.reasoning.begins_inside and not tail.endswith(self.reasoning.end) else ""


def response_template(tools: ToolFormat | None, reasoning: ReasoningFormat | None) -> ResponseTemplate:
    """Return a template for transformers' parser. All fields are plain texts, so that no text makes it fail."""
    fields: dict[str, dict[str, Any]] = {_CONTENT: {}}
    if reasoning is not None:
        begin, end = regex.escape(reasoning.begin), regex.escape(reasoning.end)
        fields[_REASONING] = {"open_pattern": rf"\A\s*{begin}", "close_pattern": rf"\s{{0,20}}{end}"}
    if tools is not None:
        closing = {} if tools.closing is None else {"close": tools.closing}
        fields[_CALLS] = {"open_pattern": tools.opening, "repeats": True, **closing}
        if tools.dropped is not None:  # a field without text: it ends at the next character
            dropped = rf"\s{{0,20}}{regex.escape(tools.dropped)}"
            fields[_DROPPED] = {"open_pattern": dropped, "close_pattern": r"(?=[\s\S])", "repeats": True}
    return load_response_template({"start_anchor_pattern": r"\A", "fields": fields})


class AnswerParser:
    """Separates the deltas of one sequence. It is stateful: one for each sequence."""

    def __init__(self, form: AnswerFormat, request: GenerationRequest, hides_special: bool) -> None:
        """`hides_special`: special tokens stay in the text for the parser, and the client must not see the last one."""
        self._format = form
        self._request = request
        self._hides_special = hides_special
        self._schemas = function_schemas(request)
        self._parser: ResponseParser
        self._out = _Output()
        self._calls: _Calls | None = None
        self._count = 0
        self._after_marker = False  # white space is dropped until the next text
        self._in_reasoning = False
        self._reasoning_tokens = 0

    def parse(self, delta: Delta) -> Delta:
        """Return `delta` with its text separated."""
        if delta.prompt_text is not None:
            self._begin(delta.prompt_text)
        text, ended = delta.text, delta.finish_reason is not None
        if ended and self._hides_special:
            text = _without_end(delta)
        was_in_reasoning = self._in_reasoning
        self._feed(text, delta.finish_reason)
        if was_in_reasoning and self._in_reasoning:
            self._reasoning_tokens += len(delta.tokens)
        out, self._out = self._out, _Output()
        shown, usage = self._request.chat.include_reasoning, delta.usage
        if usage is not None and self._format.reasoning is not None:
            usage = msgspec.structs.replace(usage, reasoning_tokens=self._reasoning_tokens)
        return msgspec.structs.replace(
            delta,
            text="".join(out.content),
            reasoning="".join(out.reasoning) if shown else "",
            tool_calls=tuple(out.calls),
            # A client that leaves out the reasoning must not get it through the log probabilities of its tokens.
            tokens=delta.tokens if shown else (),
            usage=usage,
        )

    def _begin(self, prompt: str) -> None:
        self._parser = ResponseParser(self._format.template, prefix=self._format.prefix(prompt))
        self._route(self._parser.initial_events, "marker")

    def _feed(self, text: str, ended: FinishReason | None) -> None:
        self._route(self._parser.feed(text), "marker")
        if ended is not None:
            self._route(self._parser.finalize()[1], "model" if ended == "eos_token" else "limit")

    def _route(self, events: Sequence[Mapping[str, Any]], end: CallsEnd) -> None:
        for event in events:
            kind, field = event["type"], event["field"]
            if kind == "region_chunk":
                self._add(field, event["text"])
            elif kind == "region_open":
                self._open(field)
            else:
                self._close(field, end)

    def _open(self, field: str) -> None:
        if field == _CALLS:
            assert self._format.tools is not None
            self._calls = _Calls(self._format.tools, self._schemas, self._request.stream)
        self._in_reasoning = field == _REASONING
        self._after_marker = self._after_marker or self._in_reasoning

    def _add(self, field: str, text: str) -> None:
        if field == _CALLS:
            assert self._calls is not None
            self._emit(self._calls.feed(text))
            return
        if self._after_marker:
            text = text.lstrip()
            self._after_marker = not text
        (self._out.reasoning if field == _REASONING else self._out.content).append(text)

    def _close(self, field: str, end: CallsEnd) -> None:
        if field == _CALLS:
            assert self._calls is not None
            pieces, rest = self._calls.close(end)
            self._emit(pieces)
            self._out.content.append(rest)
            self._calls = None
        self._in_reasoning = False
        self._after_marker = field != _CONTENT

    def _emit(self, pieces: Sequence[CallPiece]) -> None:
        for piece in pieces:
            if piece.name is not None:
                assert self._format.tools is not None
                call_id = self._format.tools.make_id(piece.name, self._count)
                self._out.calls.append(ToolCallDelta(self._count, call_id, piece.name, ""))
                self._count += 1
            else:
                self._out.calls.append(ToolCallDelta(self._count - 1, arguments=piece.arguments))


class _Output:
    """What one delta adds to the answer."""

    def __init__(self) -> None:
        self.content: list[str] = []
        self.reasoning: list[str] = []
        self.calls: list[ToolCallDelta] = []


CallsEnd = Literal["marker", "model", "limit"]
"""What ends the text of calls: the marker behind them, the model's end token, or a limit on the answer."""


class _Calls:
    """The calls between two markers.

    A stream sends arguments as they come, so that a call whose arguments turn out to be no JSON stays a call. A whole
    answer waits for the end, and has such a text as its content. A call that a limit cuts off is no content of either:
    both have as much of it as came, once its name is complete.
    """

    def __init__(self, form: ToolFormat, schemas: Mapping[str, Any], stream: bool) -> None:
        self._format = form
        self._reader: CallReader = form.reader(schemas)
        self._stream = stream
        self._texts: list[str] = []
        self._waiting: list[CallPiece] = []
        self._called = False

    def feed(self, text: str) -> Sequence[CallPiece]:
        """Take more text; return what a stream sends for it."""
        self._texts.append(text)
        pieces = self._reader.feed(text)
        self._called = self._called or bool(pieces)
        if self._stream:
            return pieces
        self._waiting += pieces
        return ()

    def close(self, end: CallsEnd) -> tuple[Sequence[CallPiece], str]:
        """Return the rest of the calls, and the text that is no call."""
        closed, cut = end == "marker", end == "limit" and self._reader.is_cut_call
        pieces = self._reader.close(closed)
        rest = "" if cut else self._reader.rest
        if not (self._called or pieces):
            return (), "" if cut else self._with_markers(closed)
        if self._stream:
            return pieces, rest
        pieces = self._waiting + pieces
        return (pieces, rest) if cut or _are_whole(pieces) else ((), self._with_markers(closed))

    def _with_markers(self, closed: bool) -> str:
        """Return the text between the markers with the markers, as the model wrote it."""
        return self._format.begin + "".join(self._texts) + (self._format.end if closed else "")


def _are_whole(pieces: Sequence[CallPiece]) -> bool:
    """Return whether the arguments of every call are a JSON object."""
    arguments: list[str] = []
    for piece in pieces:
        if piece.name is not None:
            arguments.append("")
        else:
            arguments[-1] += piece.arguments
    return all(is_object(text) for text in arguments)


class NamedCallParser:
    """Makes the answer of a request that names its function a call: all of the text is its arguments."""

    def __init__(self, form: ToolFormat, name: str) -> None:
        self._first: ToolCallDelta | None = ToolCallDelta(0, form.make_id(name, 0), name, "")

    def parse(self, delta: Delta) -> Delta:
        """Return `delta` with its text as arguments."""
        pieces = [ToolCallDelta(0, arguments=delta.text)] if delta.text else []
        if pieces and self._first is not None:  # an answer that is cut off before its first text has no call
            pieces.insert(0, self._first)
            self._first = None
        return msgspec.structs.replace(delta, text="", tool_calls=tuple(pieces))


def function_schemas(request: GenerationRequest) -> dict[str, Any]:
    """Return the schema of the parameters of each function that the request offers, by its name."""
    functions = [tool["function"] for tool in request.tools or ()]
    return {function["name"]: function.get("parameters") for function in functions}


def _without_end(delta: Delta) -> str:
    """Return the text of the last delta without the special token that ended it."""
    last = delta.tokens[-1] if delta.tokens else None
    return delta.text if last is None or not last.special else delta.text.removesuffix(last.text)
