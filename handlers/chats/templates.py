"""What a chat template shows: whether it takes tools, and in which form its model writes calls of them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lmi_server.files.regular_files import read_regular

AUTO = "auto"
TOOL_PARSERS = (
    "deepseek_v3",
    "deepseek_v31",
    "glm45",
    "granite",
    "hermes",
    "internlm",
    "kimi_k2",
    "llama3_json",
    "llama4_json",
    "llama4_pythonic",
    "mistral",
    "olmo3",
    "phi4_mini_json",
    "pythonic",
    "qwen3_coder",
    "qwen3_xml",
)
"""The forms of calls in `formats.py`, by the names of vLLM's parsers."""
REASONING_PARSERS = (
    "deepseek_r1",
    "deepseek_v3",
    "glm45",
    "granite",
    "holo2",
    "kimi_k2",
    "mistral",
    "olmo3",
    "qwen3",
    "seed_oss",
)
"""The forms of reasoning in `formats.py`, by the names of vLLM's parsers."""

TRACES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("openai", ("<|start|>", "<|channel|>", "<|message|>")),
    ("minimax_m2", ("<minimax:tool_call>",)),
    ("seed_oss", ("<seed:tool_call>",)),
    ("qwen3_xml", ("<function=", "<parameter=")),
    ("glm45", ("<tool_call>", "<arg_key>")),
    ("kimi_k2", ("<|tool_call_argument_begin|>",)),
    ("deepseek_v3", ("<｜tool▁call▁begin｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁call▁begin｜>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("internlm", ("<|plugin|>",)),
    ("llama4_pythonic", ("<|python_start|>",)),
    ("pythonic", ("func_name1(params_name1=",)),
    ("llama3_json", ("<|python_tag|>",)),
    ("llama3_json", ('{"name": function name, "parameters":',)),
    ("phi4_mini_json", ("functools[",)),
    ("olmo3", ("<function_calls>",)),
    ("hermes", ("<tool_call>",)),
    ("granite", ("<|tool_call|>",)),
)
"""What a template has that teaches a form: the first entry whose texts it all has wins.

The form may be one that only vLLM reads.
"""

_JINJA = re.compile(r"\{[{%].*?[%}]\}", re.DOTALL)
_TOOLS = re.compile(r"(?<![\w.'\"])tools\b(?!['\"])")


def takes_tools(template: str) -> bool:
    """Return whether a chat template reads the tools of a request."""
    return any(_TOOLS.search(statement[0]) for statement in _JINJA.finditer(template))


def tool_parser_of(template: str) -> str | None:
    """Return vLLM's name of the form of calls that a chat template teaches the model; None if it is not known."""
    if not takes_tools(template):
        return None
    plain = template.replace('\\"', '"')
    return next((name for name, texts in TRACES if all(text in plain for text in texts)), None)


def template_for_tools(templates: str | Mapping[str, str] | None) -> str | None:
    """Return the template that renders tools, of one or of several by name; None if there is none."""
    if isinstance(templates, Mapping):
        return templates.get("tool_use") or templates.get("default")
    return templates or None


def stored_template(model: Path) -> str | None:
    """Return the template for tools in the files of a checkpoint; None if there is none, or none that can be read."""
    for name in ("additional_chat_templates/tool_use.jinja", "chat_template.jinja"):
        if (model / name).is_file():
            return (model / name).read_text(encoding="utf-8", errors="replace")
    for name in ("chat_template.json", "tokenizer_config.json"):
        found = template_for_tools(_by_name(_field(model / name, "chat_template")))
        if found is not None:
            return found
    return None


def _by_name(templates: Any) -> str | Mapping[str, str] | None:
    """Return several templates by their names; a checkpoint lists them as objects with `name` and `template`."""
    if isinstance(templates, list):
        return {entry["name"]: entry["template"] for entry in templates}
    return templates if isinstance(templates, str | Mapping) else None


def _field(path: Path, name: str) -> Any:
    try:
        decoded = json.loads(read_regular(path))
    except (OSError, ValueError, RecursionError):
        return None
    return decoded.get(name) if isinstance(decoded, dict) else None
