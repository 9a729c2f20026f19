"""What chat templates show: whether they take tools, in which form, and how they want the arguments of calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jinja2
import pytest

from handlers.chats.formats import REASONING_FORMATS, TOOL_FORMATS
from handlers.chats.messages import needs_text, template_messages, with_known_roles
from handlers.chats.templates import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    stored_template,
    takes_tools,
    template_for_tools,
    tool_parser_of,
)
from lmi_server.contract.errors import RequestError

# What templates of these families have.
TEACHES = {
    "hermes": '<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call>',
    "qwen3_xml": "<tool_call>\\n<function=example_function_name>\\n<parameter=example_parameter_1>",
    "glm45": "<tool_call>{function-name}\\n<arg_key>{arg-key-1}</arg_key>",
    "llama3_json": 'Respond in the format {\\"name\\": function name, \\"parameters\\": dictionary of argument name',
    "llama4_pythonic": "<|python_start|>",
    "pythonic": "[func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2(params)]",
    "mistral": "[AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_CALLS]",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\\n```json\\n",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>tool_call_name<｜tool▁sep｜>tool_call_arguments",
    "kimi_k2": "<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>",
    "granite": "<|tool_call|>",
    "phi4_mini_json": "functools[",
    "internlm": "<|action_start|><|plugin|>",
    "olmo3": "<function_calls>",
    "openai": "<|start|>assistant<|channel|>commentary<|message|>",
}


@pytest.mark.parametrize(("parser", "text"), TEACHES.items())
def test_a_template_shows_the_form_of_calls(parser: str, text: str) -> None:
    assert tool_parser_of("{% if tools %}" + text + "{% endif %}") == parser
    assert tool_parser_of(text) is None


@pytest.mark.parametrize(
    ("template", "takes"),
    [
        ("{%- if tools is not none %}", True),
        ("{{ tools | tojson }}", True),
        ("{% for t in tools|selectattr('type') %}", True),
        ("{% if message.tools %}{{ message['tools'] }} tools", False),
        ("{% for message in messages %}{{ message.content }}", False),
    ],
)
def test_a_template_takes_tools_if_it_reads_them(template: str, takes: bool) -> None:
    assert takes_tools(template) is takes


def test_the_names_of_parsers_are_those_of_the_forms() -> None:
    assert (set(TOOL_PARSERS), set(REASONING_PARSERS)) == (set(TOOL_FORMATS), set(REASONING_FORMATS))


def test_the_template_of_a_checkpoint(tmp_path: Path) -> None:
    assert stored_template(tmp_path) is None
    several = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    assert stored_template(tmp_path) == "with tools"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "one"}))
    assert stored_template(tmp_path) == "one"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert stored_template(tmp_path) == "file"
    assert template_for_tools({"default": "plain"}) == "plain"


def rendered(template: str) -> Any:
    """Return what renders messages and tools with `template`."""
    compiled = jinja2.Environment().from_string(template)
    return lambda messages, tools: compiled.render(messages=messages, tools=tools)


@pytest.mark.parametrize(
    ("arguments", "as_text"),
    [("tojson", False), ("string", True), ("'' + call.function.arguments", True), ("call.nothing.here", False)],
)
def test_a_template_wants_arguments_as_an_object_or_as_text(arguments: str, as_text: bool) -> None:
    value = arguments if " " in arguments or "." in arguments else f"call.function.arguments | {arguments}"
    calls = "{% for message in messages %}{% for call in message.tool_calls or [] %}{{ " + value + " }}"
    template = calls + "{% endfor %}{% endfor %}"
    assert needs_text(rendered(template)) is as_text


def test_a_developer_is_the_system_of_a_template_that_does_not_know_the_role() -> None:
    user, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    developer, system = {"role": "developer", "content": "c"}, {"role": "system", "content": "d"}
    older = "{% if message['role'] == 'system' %}"
    assert with_known_roles([developer, user], older) == [{"role": "system", "content": "c"}, user]
    merged = [{"role": "system", "content": "d\n\nc"}, user, answer]
    assert with_known_roles([system, user, answer, developer], older) == merged
    assert with_known_roles([system, developer, user, answer], {"default": older}) == merged
    for template, messages in ((older, [system, user, system]), ('== "developer"', [user, developer])):
        assert with_known_roles(messages, template) == messages


def test_arguments_become_what_the_template_wants() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "é"}'}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call], "reasoning": "hm"}, {"role": "tool"}]
    with_objects = template_messages(messages, lambda: False)
    assert with_objects[0]["tool_calls"][0]["function"]["arguments"] == {"a": "é"}
    assert (with_objects[0]["reasoning_content"], with_objects[1]) == ("hm", {"role": "tool"})
    assert template_messages(with_objects, lambda: True)[0]["tool_calls"] == [call]
    assert messages[0]["tool_calls"] == [call]
    for text in ("no object", "[" * 100_000):
        other = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": text}}]}
        assert template_messages([other], lambda: False)[0]["tool_calls"][0]["function"]["arguments"] == text
    for wrong in ("f", [1], [{"function": {}}]):
        with pytest.raises(RequestError, match=r"messages\[0\]\.tool_calls"):
            template_messages([{"role": "assistant", "tool_calls": wrong}], lambda: False)
