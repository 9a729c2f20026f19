"""RayLLM's prompt_format as a chat template in Jinja, which every engine here reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from string import Formatter

from lmi_server.configuration.model_file.rayllm import PromptFormat
from lmi_server.contract.generation import PROMPT_BEGINNING


def chat_template(prompt: PromptFormat) -> str:
    """Return the template that makes RayLLM's prompt of a chat.

    One system message is allowed, at any place; it moves to the top, or into the first message of the user.
    """
    system_in_user = prompt.system_in_user
    parts = [
        # RayLLM had the tokenizer add its special tokens, which a template has to write itself.
        PROMPT_BEGINNING,
        "{%- set ns = namespace(system=none) -%}",
        "{%- for message in messages -%}{%- if message['role'] == 'system' -%}",
        "{%- if ns.system is not none -%}{{ raise_exception('only one system message is allowed') }}{%- endif -%}",
        "{%- set ns.system = message['content'] -%}{%- endif -%}{%- endfor -%}",
        _default_system(prompt),
        "" if system_in_user else _system(prompt),
        "{%- for message in messages -%}{%- set content = message['content']",
        " | trim -%}" if prompt.strip_whitespace else " -%}",
        "{%- if message['role'] == 'user' -%}",
        _user(prompt),
        "{%- elif message['role'] == 'assistant' -%}",
        _format_pattern(prompt.assistant, {"instruction": "content"}),
        "{%- elif message['role'] != 'system' -%}",
        "{{ raise_exception('the roles of messages are system, user and assistant') }}{%- endif -%}{%- endfor -%}",
        "{%- if add_generation_prompt -%}",
        _text(prompt.trailing_assistant),
        "{%- endif -%}",
    ]
    return "".join(parts)


def _default_system(prompt: PromptFormat) -> str:
    if not prompt.default_system_message and not prompt.add_system_tags_even_if_message_is_empty:
        return ""
    default = json.dumps(prompt.default_system_message, ensure_ascii=False)
    return "{%- if ns.system is none -%}{%- set ns.system = " + default + " -%}{%- endif -%}"


def _system(prompt: PromptFormat) -> str:
    empty_too = prompt.add_system_tags_even_if_message_is_empty
    condition = "ns.system is not none" if empty_too else "ns.system"
    content = "ns.system | trim" if prompt.strip_whitespace else "ns.system"
    return "{%- if " + condition + " -%}" + _format_pattern(prompt.system, {"instruction": content}) + "{%- endif -%}"


def _user(prompt: PromptFormat) -> str:
    if not prompt.system_in_user:
        return _format_pattern(prompt.user, {"instruction": "content", "system": '""'})
    inner = _format_pattern(prompt.system, {"instruction": "ns.system"})
    written = "{%- set system -%}{%- if ns.system is not none -%}" + inner + "{%- endif -%}{%- endset -%}"
    # The first message of the user takes the system message with it.
    taken = "{%- set ns.system = none -%}"
    return written + _format_pattern(prompt.user, {"instruction": "content", "system": "system"}) + taken


def _format_pattern(pattern: str, expressions: Mapping[str, str]) -> str:
    """Return Jinja for a pattern of str.format, with an expression for each of its names."""
    parts = []
    for text, name, _, _ in Formatter().parse(pattern):
        parts.append(_text(text))
        if name is not None:
            parts.append("{{- " + expressions[name] + " -}}")
    return "".join(parts)


def _text(text: str) -> str:
    """Return Jinja that writes exactly `text`: as a constant, since Jinja strips white space around its tags."""
    return "{{- " + json.dumps(text, ensure_ascii=False) + " -}}" if text else ""
