"""The options of handlers that parse answers by this project's own formats; importable without transformers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from handlers.chats.templates import AUTO, REASONING_PARSERS, TOOL_PARSERS, stored_template, takes_tools, tool_parser_of
from handlers.checkpoints.chat_template import CHAT_TEMPLATE_DESCRIPTION, read_chat_template
from lmi_server.configuration.declaration import Allowed, Conflict, Documented
from lmi_server.configuration.engine import EngineDescription
from lmi_server.configuration.options import ModelOptions, one_of
from lmi_server.configuration.references import NAMES_NOTHING, NAMES_TEMPLATE
from lmi_server.contract.errors import ModelLoadError

PARSER_KEY = "option.tool_call_parser"
TOOL_PARSER_NOTE = Documented(None, "agents send tools without asking for a parser")


_MORE = "option.rolling_batch=vllm has further parsers"


class ParserOptions(ModelOptions):
    """Keys of serving.properties for tools and reasoning in chats."""

    chat_template: Annotated[str | None, NAMES_TEMPLATE] = Field(None, description=CHAT_TEMPLATE_DESCRIPTION)
    enable_auto_tool_choice: Annotated[bool, Documented("false", "agents send tools and let the model choose")] = True
    """Let the model choose tools; if false, only requests that demand a call may send tools."""
    tool_call_parser: Annotated[
        str,
        one_of((AUTO, *TOOL_PARSERS)),
        Allowed(f"auto, {', '.join(TOOL_PARSERS)}; {_MORE}"),
        TOOL_PARSER_NOTE,
        NAMES_NOTHING,
    ] = AUTO
    """Form in which the model calls tools, by the name of vLLM's parser; auto is by the template."""
    enable_reasoning: bool = False
    """Answer with the reasoning apart from the content; requires reasoning_parser."""
    reasoning_parser: Annotated[
        Annotated[str, one_of(REASONING_PARSERS), Allowed(f"{', '.join(REASONING_PARSERS)}; {_MORE}")] | None,
        NAMES_NOTHING,
    ] = None
    """Form in which the model writes its reasoning, by the name of vLLM's parser."""

    def reasoning_conflicts(self) -> Iterator[Conflict]:
        """Yield a conflict if reasoning needs a parser and none is named."""
        if self.enable_reasoning and self.reasoning_parser is None:
            yield Conflict(("option.enable_reasoning",), "true only with option.reasoning_parser")


def tool_parser_notes(engine: EngineDescription[Any], model_dir: Path, location: Path) -> Mapping[str, str]:
    """Return what option.tool_call_parser=auto chooses, for `explain`; empty if the template is not here yet.

    It is `EngineDescription.notes` of the engines that have the option.
    """
    if engine.options.tool_call_parser != AUTO:
        return {}
    chat_template = engine.options.chat_template
    try:
        template = stored_template(location) if chat_template is None else read_chat_template(chat_template, model_dir)
    except ModelLoadError:
        return {}
    return {} if template is None else {PARSER_KEY: choice_in_words(template)}


def choice_in_words(template: str) -> str:
    """Return which parser a template means, or why it means none."""
    if not takes_tools(template):
        return "none: the chat template takes no tools"
    return tool_parser_of(template) or "none: the chat template teaches no form of calls that is known"
