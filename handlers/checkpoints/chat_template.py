"""Reads the value of option.chat_template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lmi_server.contract.errors import ModelLoadError
from lmi_server.contract.generation import PROMPT_BEGINNING

CHAT_TEMPLATE_DESCRIPTION = (
    "Chat template to use instead of the model's: a file, relative to the model directory, or the template itself."
)


def read_chat_template(value: str, model_dir: Path) -> str:
    """Return the chat template in `value`, or in the file of that name. Raises ModelLoadError."""
    if "{" in value:
        return value
    file = model_dir / value  # an absolute path replaces model_dir
    if not file.is_file():
        raise ModelLoadError(
            f"option.chat_template={value} is neither a file nor a template; name a file, relative to the model"
            f" directory {model_dir}"
        )
    return file.read_text(encoding="utf-8")


def with_prompt_beginning(template: str, tokenizer: Any) -> str:
    """Return the template with what `tokenizer` puts before a prompt in place of PROMPT_BEGINNING."""
    if PROMPT_BEGINNING not in template:
        return template
    bare, whole = tokenizer.encode("a", add_special_tokens=False), tokenizer.encode("a")
    starts = [at for at in range(len(whole)) if whole[at : at + len(bare)] == bare]
    text = tokenizer.decode(whole[: starts[0]]) if starts else ""
    # As a constant, since Jinja strips white space around its tags.
    return template.replace(PROMPT_BEGINNING, "{{- " + json.dumps(text, ensure_ascii=False) + " -}}")
