"""Answers in the form of each model family, parsed whole and cut at every place."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from growth import assert_linear

from handlers.chats.answers import AnswerFormat, AnswerParser
from handlers.chats.formats import REASONING_FORMATS, TOOL_FORMATS
from lmi_server.contract.generation import (
    ChatOptions,
    Delta,
    FinishReason,
    GenerationRequest,
    SamplingParameters,
    Token,
)

PLACE = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "units": {"type": ["string", "null"]},
        "spots": {"type": "array"},
    },
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": PLACE}},
    {"type": "function", "function": {"name": "clock"}},
]
PARIS = {"city": 'Pa"r}i\\s é', "days": 3}
CALL = json.dumps({"name": "weather", "arguments": PARIS}, ensure_ascii=False)
LLAMA = json.dumps({"name": "weather", "parameters": PARIS}, ensure_ascii=False)
ARGUMENTS = json.dumps(PARIS, ensure_ascii=False)
WEATHER, CLOCK = ("weather", PARIS), ("clock", {})
Call = tuple[str, dict[str, Any]]
# The form, an answer, its content, its calls.
FAMILIES: tuple[tuple[str, str, str, tuple[Call, ...]], ...] = (
    ("hermes", f"<tool_call>\n{CALL}\n</tool_call>", "", (WEATHER,)),
    (
        "hermes",
        f"Let me look.\n<tool_call>\n{CALL}\n</tool_call>\n"
        '<tool_call>{"name": "clock", "arguments": {}}</tool_call>\n',
        "Let me look.",
        (WEATHER, CLOCK),
    ),
    ("hermes", f"<tool_call>{CALL}", "", (WEATHER,)),
    ("hermes", f"<tool_call>[{CALL}, {CALL}]</tool_call> Done.", "Done.", (WEATHER, WEATHER)),
    ("hermes", '<tool_call>{"arguments": {"days": 1}, "name": "weather"}</tool_call>', "", (("weather", {"days": 1}),)),
    ("hermes", '<tool_call>{"name": "clock"}</tool_call>', "", (CLOCK,)),
    ("llama3_json", LLAMA, "", (WEATHER,)),
    ("llama3_json", f"<|python_tag|>{LLAMA}; {LLAMA}", "", (WEATHER, WEATHER)),
    ("llama3_json", '{"type": "function", "name": "clock", "parameters": {}}', "", (CLOCK,)),
    ("llama3_json", '{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', ()),
    ("llama3_json", '{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}', ()),
    ("mistral", f"[TOOL_CALLS] [{CALL}, {CALL}]", "", (WEATHER, WEATHER)),
    ("mistral", f"Sure.[TOOL_CALLS]weather[ARGS]{ARGUMENTS}[TOOL_CALLS]clock{{}}", "Sure.", (WEATHER, CLOCK)),
    ("mistral", f"[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{ARGUMENTS}", "", (WEATHER,)),
    (
        "qwen3_xml",
        "I look.\n<tool_call>\n<function=weather>\n<parameter=city>\nNew\nYork\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n"
        '<parameter=spots>\n[1, {"a": "b"}]\n</parameter>\n</function>\n</tool_call>',
        "I look.",
        (("weather", {"city": "New\nYork", "days": 3, "spots": [1, {"a": "b"}]}),),
    ),
    ("qwen3_coder", "<function=clock>\n</function>", "", (CLOCK,)),
    ("qwen3_coder", "<function=clock></function><function=weather><parameter=units>none</parameter></function>", "",
     (CLOCK, ("weather", {"units": "none"}))),
    ("qwen3_coder", "<function=weather>\n<parameter=city>a<b\n<parameter=units>\nnull\n</function>\n</tool_call>", "",
     (("weather", {"city": "a<b", "units": None}),)),
    (
        "glm45",
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n<arg_key>days</arg_key>\n<arg_value>2"
        "</arg_value>\n</tool_call>\n<tool_call>clock\n</tool_call>",
        "",
        (("weather", {"city": "Rome", "days": 2}), CLOCK),
    ),
    ("pythonic", "[weather(city='it\\'s', days=-2, units=None), clock()]", "",
     (("weather", {"city": "it's", "days": -2, "units": None}), CLOCK)),
    ("pythonic", "[weather(spots=[true, {'a': null}])]", "", (("weather", {"spots": [True, {"a": None}]}),)),
    ("pythonic", "[1, 2]", "[1, 2]", ()),
    ("pythonic", "[open(file='x')]", "[open(file='x')]", ()),
    ("llama4_pythonic", "<|python_start|>[clock()]<|python_end|>", "", (CLOCK,)),
    ("olmo3", "<function_calls>\nweather(days=1)\nclock()\n</function_calls>", "", (("weather", {"days": 1}), CLOCK)),
    (
        "deepseek_v3",
        "Sure.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
        f"{ARGUMENTS}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>clock\n```json\n{{}}\n"
        "```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "Sure.",
        (WEATHER, CLOCK),
    ),
    (
        "deepseek_v31",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
        (WEATHER,),
    ),
    (
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
        f"{ARGUMENTS}<|tool_call_end|><|tool_calls_section_end|>",
        "",
        (WEATHER,),
    ),
    ("granite", f"<|tool_call|>[{CALL}]", "", (WEATHER,)),
    ("phi4_mini_json", f"functools[{CALL}]", "", (WEATHER,)),
    ("internlm", f"Hm.<|action_start|><|plugin|>\n{LLAMA}<|action_end|>\n", "Hm.", (WEATHER,)),
)  # fmt: skip
# What is no call: no JSON, no name, no mapping.
MALFORMED = (
    ("hermes", "<tool_call>\n{name: weather}\n</tool_call>"),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call> and more'),
    ("hermes", '<tool_call>{"name": "weather", "arguments": [1]}</tool_call>'),
    ("hermes", "a < b <tool"),
    ("mistral", "[TOOL_CALLS] none"),
    ("pythonic", "[weather(city=open('x'))]"),
    ("pythonic", "[weather("),
    ("deepseek_v31", "<｜tool▁call▁begin｜>weather<｜tool▁call▁end｜>"),
    ("olmo3", "<function_calls>\nweather('a')\n</function_calls>"),
)
# JSON is wrong only behind the name: a stream has sent the call by then, a whole answer has it as content.
BROKEN_LATE = (
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": Paris}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "Pa'),
    ("qwen3_xml", "<tool_call>\n<function=weather>\n<parameter=city>\nPa"),
)
# The form, what a limit has left of an answer, its content, its calls with what came of their arguments.
CUT = (
    ("hermes", 'Hm.<tool_call>{"name": "weather", "arguments": {"city": "Pa', "Hm.", [("weather", '{"city": "Pa')]),
    ("hermes", '<tool_call>{"name": "wea', "", []),
    ("hermes", '<tool_call>{"arguments": {"city": "Pa', "", []),
    ("hermes", f'<tool_call>[{CALL}, {{"name": "clo', "", [("weather", ARGUMENTS)]),
    ("llama3_json", '{"name": "weather", "parameters": {"city": "Pa', "", [("weather", '{"city": "Pa')]),
    ("llama3_json", '{"name": "wea', "", []),
    ("llama3_json", '{"name": "Bo', '{"name": "Bo', []),
    ("llama3_json", '{"size": 3, "na', '{"size": 3, "na', []),
    ("mistral", '[TOOL_CALLS] [{"name": "weather", "arguments": {"ci', "", [("weather", '{"ci')]),
    ("qwen3_xml", "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=da", "",
     [("weather", '{"city": "Rome"')]),
    ("qwen3_xml", "<tool_call>\n<function=wea", "", []),
    ("glm45", "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Ro", "", [("weather", "")]),
    ("pythonic", "[weather(city='Pa", "", []),
    ("pythonic", "[open(file='x", "[open(file='x", []),
    ("olmo3", "<function_calls>\nweather(days=", "", []),
    ("deepseek_v31", "<｜tool▁call▁begin｜>weath", "", []),
    ("kimi_k2", "<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{", "", [("weather", "{")]),
)  # fmt: skip


class Answer:
    """What the deltas of an answer add up to."""

    def __init__(self, deltas: Sequence[Delta]) -> None:
        self.content = "".join(delta.text for delta in deltas)
        self.reasoning = "".join(delta.reasoning for delta in deltas)
        self.pieces = [piece for delta in deltas for piece in delta.tool_calls]
        self.calls: list[tuple[str, str]] = []
        for piece in self.pieces:
            if piece.name is not None:
                assert piece.id
                assert piece.index == len(self.calls)
                self.calls.append((piece.name, ""))
            name, arguments = self.calls[piece.index]
            self.calls[piece.index] = (name, arguments + (piece.arguments or ""))

    @property
    def parsed(self) -> tuple[tuple[str, dict[str, Any]], ...]:
        return tuple((name, json.loads(arguments)) for name, arguments in self.calls)

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Answer)
        return (self.content, self.reasoning, self.calls) == (other.content, other.reasoning, other.calls)

    __hash__ = None  # type: ignore[assignment]


def answer(
    pieces: Sequence[str],
    tools: str | None = None,
    reasoning: str | None = None,
    prompt: str = "",
    stream: bool = True,
    cut: FinishReason | None = None,
    **chat: Any,
) -> Answer:
    """Return the parsed answer of a model that generates `pieces`; `cut` is what ends it before its end token."""
    request = GenerationRequest(
        request_id="1",
        prompt=None,
        sampling=SamplingParameters(),
        tools=TOOLS,
        chat=ChatOptions(tool_choice="auto", **chat),
        stream=stream,
    )
    form = AnswerFormat.from_formats(tools and TOOL_FORMATS[tools], reasoning and REASONING_FORMATS[reasoning])  # type: ignore[arg-type]
    parser = AnswerParser(form, request, hides_special=True)
    deltas = [Delta(piece, (Token(1, piece),), prompt_text=None if at else prompt) for at, piece in enumerate(pieces)]
    if cut is not None:
        deltas[-1] = msgspec.structs.replace(deltas[-1], finish_reason=cut)
        return Answer([parser.parse(delta) for delta in deltas])
    deltas.append(
        Delta("<eos>", (Token(2, "<eos>", special=True),), "eos_token", prompt_text=None if pieces else prompt)
    )
    return Answer([parser.parse(delta) for delta in deltas])


def cuts(text: str) -> list[list[str]]:
    """Return `text` cut in two at every place, and into single characters."""
    return [list(text), *([text[:at], text[at:]] for at in range(1, len(text)))]


@pytest.mark.parametrize(("tools", "text", "content", "calls"), FAMILIES)
def test_each_family_reads_the_same_whole_and_cut_anywhere(
    tools: str, text: str, content: str, calls: tuple[Call, ...]
) -> None:
    whole = answer([text], tools, stream=False)
    assert (whole.content, whole.parsed) == (content, calls)
    assert all(answer(pieces, tools) == whole for pieces in cuts(text))


def test_every_form_is_tested() -> None:
    assert {tools for tools, *_ in FAMILIES} == TOOL_FORMATS.keys() - {"llama4_json"}


@pytest.mark.parametrize(("tools", "text"), MALFORMED)
def test_a_malformed_call_stays_content(tools: str, text: str) -> None:
    whole = answer([text], tools, stream=False)
    assert (whole.content.replace("</tool_call>and", "</tool_call> and"), whole.calls) == (text, [])
    assert all(answer(pieces, tools) == whole for pieces in cuts(text))


@pytest.mark.parametrize("opening", ["", '{"name": "weather", "arguments": '])
def test_json_that_is_deeper_than_the_parser_goes_stays_content(opening: str) -> None:
    text = f"<tool_call>{opening}{'[' * 100_000}</tool_call>"
    whole = answer([text], "hermes", stream=False)
    assert (whole.content, whole.calls) == (text, [])


@pytest.mark.parametrize(("tools", "text"), BROKEN_LATE)
def test_a_call_that_breaks_behind_its_name_is_content_of_a_whole_answer(tools: str, text: str) -> None:
    whole = answer([text], tools, stream=False)
    assert (whole.content, whole.calls) == (text, [])
    (streamed,) = answer(list(text), tools).calls
    assert streamed[0] == "weather"


@pytest.mark.parametrize("cut", ["length", "stop_sequence"])
@pytest.mark.parametrize(("tools", "text", "content", "calls"), CUT)
def test_nothing_of_a_call_that_a_limit_cuts_off_is_content(
    tools: str, text: str, content: str, calls: list[tuple[str, str]], cut: FinishReason
) -> None:
    whole = answer([text], tools, stream=False, cut=cut)
    assert (whole.content, whole.calls) == (content, calls)
    assert all(answer(pieces, tools, cut=cut) == whole for pieces in cuts(text))


def test_arguments_are_streamed_as_they_come() -> None:
    pieces = ['<tool_call>{"name": "wea', 'ther", "argum', 'ents": {"ci', 'ty": "Par', 'is"}', "}</tool_call>"]
    sent = [(piece.name, piece.arguments) for piece in answer(pieces, "hermes").pieces]
    assert sent == [("weather", ""), (None, '{"ci'), (None, 'ty": "Par'), (None, 'is"}')]


THOUGHT = "<think>\nHm, 1 < 2.\n</think>\n\nIt is <think> 4."


@pytest.mark.parametrize(
    ("prompt", "text", "reasoning", "content"),
    [
        ("", THOUGHT, "Hm, 1 < 2.", "It is <think> 4."),
        ("assistant\n<think>\n", THOUGHT.removeprefix("<think>\n"), "Hm, 1 < 2.", "It is <think> 4."),
        ("user\n<think>\nassistant\n", "It is 4.", "", "It is 4."),
        ("<think>\n\n</think>\n\n", "It is 4.", "", "It is 4."),
        ("", "<think>cut", "cut", ""),
    ],
)
def test_reasoning_is_apart_from_the_content(prompt: str, text: str, reasoning: str, content: str) -> None:
    whole = answer([text], "hermes", "qwen3", prompt, stream=False)
    assert (whole.reasoning, whole.content, whole.calls) == (reasoning, content, [])
    assert all(answer(pieces, "hermes", "qwen3", prompt) == whole for pieces in cuts(text))
    hidden = answer([text], "hermes", "qwen3", prompt, include_reasoning=False)
    assert (hidden.reasoning, hidden.content) == ("", content)


def test_reasoning_content_and_calls_in_one_answer() -> None:
    text = f"<think>I should look.</think>Let me look.\n<tool_call>{CALL}</tool_call>"
    for pieces in ([text], *cuts(text)):
        found = answer(pieces, "hermes", "qwen3")
        assert (found.reasoning, found.content, found.parsed) == ("I should look.", "Let me look.", (WEATHER,))


def test_deepseek_r1_reasons_from_the_beginning() -> None:
    found = answer(["Hm.</thi", "nk>Yes."], None, "deepseek_r1", "<Assistant>")
    assert (found.reasoning, found.content) == ("Hm.", "Yes.")
    closed = answer(["Yes."], None, "deepseek_r1", "<think>\n\n</think>")
    assert (closed.reasoning, closed.content) == ("", "Yes.")


@pytest.mark.parametrize("tools", TOOL_FORMATS)
@pytest.mark.parametrize("behind", [None, "", "f"])
def test_a_run_of_spaces_costs_little(tools: str, behind: str | None) -> None:
    """Clients choose what a model writes: by a bias, a grammar, or a prompt that asks for it."""
    start = "" if behind is None else f"{TOOL_FORMATS[tools].begin}{behind}"
    assert_linear(lambda spaces: answer([start + spaces], tools), " ", 1000)


def test_arguments_that_do_not_end_cost_little() -> None:
    assert_linear(lambda text: answer([f"<tool_call>f<arg_key>{text}"], "glm45"), "</arg_key><arg_value>", 5000)
