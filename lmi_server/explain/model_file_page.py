"""Writes the tables of keys in docs/ray-keys.md from their declarations.

python -m lmi_server.explain.model_file_page docs/ray-keys.md
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from pydantic.fields import FieldInfo

from lmi_server.configuration.declaration import NoEffect, Unavailable
from lmi_server.configuration.model_file.checking import allowed_in_words
from lmi_server.configuration.model_file.llm_config import LlmConfigFile
from lmi_server.configuration.model_file.rayllm import RayLlmFile
from lmi_server.configuration.model_file.serve_sections import Section, section_of

_START, _END = "<!-- keys of {name} -->\n", "<!-- end of keys -->\n"
_FILES: dict[str, type[Section]] = {"RayLLM": RayLlmFile, "LLMConfig": LlmConfigFile}


def with_tables(page: str) -> str:
    """Return the page with the present tables between its marks."""
    for name, section in _FILES.items():
        head, start, rest = page.partition(_START.format(name=name))
        _, end, tail = rest.partition(_END)
        page = "".join((head, start, "\n", _table(section), "\n", end, tail))
    return page


def _table(section: type[Section]) -> str:
    rows = [("Key", "Allowed", "Meaning"), ("---", "---", "---"), *_rows(section, "")]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |\n" for row in rows)


def _rows(section: type[Section], prefix: str) -> Iterator[tuple[str, str, str]]:
    for name, field in section.model_fields.items():
        key = f"{prefix}{name}"
        yield f"`{key}`", allowed_in_words(field), " ".join(_sentences(field))
        nested = section_of(field.annotation)
        if nested is not None:
            yield from _rows(nested, f"{key}.")


def _sentences(field: FieldInfo) -> Iterator[str]:
    yield field.description or ""
    extra = field.json_schema_extra
    if isinstance(extra, dict):
        former = extra["formerly"]
        yield f"Also written {', '.join(f'`{name}`' for name in former)}." if isinstance(former, list) else ""
    for mark in field.metadata:
        if isinstance(mark, NoEffect):
            yield f"No effect: {mark.reason}."
        if isinstance(mark, Unavailable):
            yield f"{f'{mark.shown} is not' if mark.shown else 'Not'} available; {mark.instead}."


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")
