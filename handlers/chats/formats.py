"""The forms in which model families write calls of tools and their reasoning."""

from __future__ import annotations

import functools
import secrets
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import regex

from handlers.chats.calls import CallReader, JsonCalls, PythonCalls, TaggedCalls


@dataclass(frozen=True)
class ToolFormat:
    """How a family of models writes calls.

    `opening` is the pattern of what stands before a call, with its white space; `closing` is the text behind it. An
    opening is searched for at every place of a text, so that it takes a bounded number of spaces: a long run of them
    would be gone over from each of its places.
    Without `closing` the calls go to the end of the answer. `reader` makes the reader of what is between them, from the
    schemas of the functions by name. If that is no call, the client gets it between `begin` and `end`. `dropped` is a
    marker around several calls, which no client gets.
    """

    opening: str
    closing: str | None
    begin: str
    end: str
    reader: Callable[[Mapping[str, Any]], CallReader]
    dropped: str | None = None
    make_id: Callable[[str, int], str] = lambda name, index: f"call_{secrets.token_hex(12)}"

    @property
    def text(self) -> str:
        """All markers as text, to find out which of them are special tokens."""
        header = getattr(self.reader, "keywords", {}).get("header")
        patterns = [self.opening, self.closing, self.begin, self.end, self.dropped, header and header.pattern]
        return " ".join(pattern for pattern in patterns if pattern).replace("\\", "")


@dataclass(frozen=True)
class ReasoningFormat:
    """How a family of models writes reasoning: between two markers.

    `begins_inside`: the model leaves the first marker out, unless the prompt has closed the reasoning.
    """

    begin: str
    end: str
    begins_inside: bool = False


# A call's JSON up to its arguments; fields such as its id may stand before its name.
_FIELDS = r'\s*(?:"(?:type|id)"\s*:\s*"[^"\\]*"\s*,\s*)*"name"\s*:\s*"(?P<name>[^"\\]+)"\s*,\s*'
_JSON_HEADER = regex.compile(rf'[\s,;\[\]}}]*\{{{_FIELDS}"(?:arguments|parameters)"\s*:\s*(?=\{{)')


def _named_header(pattern: str) -> regex.Pattern[str]:
    """Return the pattern of a header that is not JSON; `pattern` has the group `name`."""
    return regex.compile(rf"[\s`]*{pattern}\s*(?=\{{)")


def _mistral_id(name: str, index: int) -> str:
    """Return an id of the nine letters and digits that Mistral's templates require."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


_JSON = functools.partial(JsonCalls, header=_JSON_HEADER)
_KNOWN_JSON = functools.partial(JsonCalls, header=_JSON_HEADER, known=True)
_MISTRAL = functools.partial(
    JsonCalls,
    header=regex.compile(
        rf"(?:{_JSON_HEADER.pattern})|\s*+(?:\[TOOL_CALLS\]\s*+)?(?P<name>[\w.-]++)\s*+(?:\[CALL_ID\]\w++\s*+)?(?:\[ARGS\]\s*+)?(?=\{{)"
    ),
)
_DEEPSEEK = functools.partial(
    JsonCalls, header=_named_header(r"(?:function<｜tool▁sep｜>)?(?P<name>[\w.-]+)(?:<｜tool▁sep｜>)?(?:\s*```json)?")
)
_KIMI = functools.partial(
    JsonCalls, header=_named_header(r"(?:functions\.)?(?P<name>[\w.-]+):\d+\s*<\|tool_call_argument_begin\|>")
)
_QWEN = functools.partial(
    TaggedCalls,
    header=regex.compile(r"\s*(?P<name>[^>\n<]+?)\s*>\s*(?=<)"),
    argument=regex.compile(
        r"\s*<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?(?:</parameter>\s*|(?=<parameter=))", regex.DOTALL
    ),
    last=regex.compile(r"\s*<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\s*\Z", regex.DOTALL),
)
_GLM = functools.partial(
    TaggedCalls,
    header=regex.compile(r"\s*(?P<name>[^\s<]+)\s*(?=<)"),
    argument=regex.compile(
        r"\s*(?><arg_key>(?P<key>.*?)</arg_key>)\s*<arg_value>(?P<value>.*?)</arg_value>\s*", regex.DOTALL
    ),
    last=regex.compile(r"(?!)(?P<key>)(?P<value>)"),
)

_HERMES_FORMAT = ToolFormat(r"\s{0,20}<tool_call>", "</tool_call>", "<tool_call>", "</tool_call>", _JSON)
_LLAMA_JSON = ToolFormat(
    r"\A\s*(?=\{)|\s{0,20}<\|python_tag\|>\s*(?=\{)", None, "", "", _KNOWN_JSON
)  # the marker is optional, so that a call is told from other JSON by its name
_PYTHONIC = ToolFormat(
    r"\A\s*(?=\[\s*[A-Za-z_][\w.]*\()|\s{0,20}<\|python_start\|>\s*(?=\[)",
    "<|python_end|>",
    "",
    "",
    functools.partial(PythonCalls, known=True),
)
_DEEPSEEK_FORMAT = ToolFormat(
    r"\s{0,20}(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    _DEEPSEEK,
    "<｜tool▁calls▁end｜>",
)
_QWEN_FORMAT = ToolFormat(
    r"\s{0,20}(?:<tool_call>\s*)?<function=",
    "</function>",
    "<tool_call>\n<function=",
    "</function>\n</tool_call>",
    _QWEN,
    "</tool_call>",
)

TOOL_FORMATS: Mapping[str, ToolFormat] = {
    "deepseek_v3": _DEEPSEEK_FORMAT,
    "deepseek_v31": _DEEPSEEK_FORMAT,
    "glm45": ToolFormat(r"\s{0,20}<tool_call>", "</tool_call>", "<tool_call>", "</tool_call>", _GLM),
    "granite": ToolFormat(r"\s{0,20}<\|tool_call\|>", None, "<|tool_call|>", "", _JSON),
    "hermes": _HERMES_FORMAT,
    "internlm": ToolFormat(
        r"\s{0,20}<\|action_start\|>\s*<\|plugin\|>",
        "<|action_end|>",
        "<|action_start|><|plugin|>",
        "<|action_end|>",
        _JSON,
    ),
    "kimi_k2": ToolFormat(
        r"\s{0,20}(?:<\|tool_calls_section_begin\|>\s*)?<\|tool_call_begin\|>",
        "<|tool_call_end|>",
        "<|tool_call_begin|>",
        "<|tool_call_end|>",
        _KIMI,
        "<|tool_calls_section_end|>",
        lambda name, index: f"functions.{name}:{index}",
    ),
    "llama3_json": _LLAMA_JSON,
    "llama4_json": _LLAMA_JSON,
    "llama4_pythonic": _PYTHONIC,
    "mistral": ToolFormat(r"\s{0,20}\[TOOL_CALLS\]", None, "[TOOL_CALLS]", "", _MISTRAL, make_id=_mistral_id),
    "olmo3": ToolFormat(
        r"\s{0,20}<function_calls>", "</function_calls>", "<function_calls>", "</function_calls>", PythonCalls
    ),
    "phi4_mini_json": ToolFormat(r"\s{0,20}functools(?=\[)", None, "functools", "", _JSON),
    "pythonic": _PYTHONIC,
    "qwen3_coder": _QWEN_FORMAT,
    "qwen3_xml": _QWEN_FORMAT,
}
"""The forms of calls by the names of vLLM's parsers of the same forms (`--tool-call-parser`)."""

REQUIRED = ToolFormat(r"\A\s*(?=\[)", None, "", "", _JSON)
"""How an answer is written that has to call a tool: a list of calls, by a constraint on the output."""

_THINK = ReasoningFormat("<think>", "</think>")
REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    "deepseek_r1": ReasoningFormat("<think>", "</think>", begins_inside=True),
    "deepseek_v3": _THINK,
    "glm45": _THINK,
    "granite": ReasoningFormat("Here is my thought process:", "Here is my response:"),
    "holo2": _THINK,
    "kimi_k2": _THINK,
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "olmo3": _THINK,
    "qwen3": _THINK,
    "seed_oss": ReasoningFormat("<seed:think>", "</seed:think>"),
}
"""The forms of reasoning by the names of vLLM's parsers of the same forms (`--reasoning-parser`)."""
