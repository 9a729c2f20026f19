"""docs/configuration.md and the pages below it are what the declarations say today."""

from __future__ import annotations

import re

import pytest
from paths import ROOT

from lmi_server.configuration.declaration import Unavailable
from lmi_server.configuration.handlers import HANDLERS, load_options_type
from lmi_server.configuration.options import ServingOptions
from lmi_server.explain.reference_page import reference_pages

DOCS = ROOT / "docs"


def test_the_pages_are_current() -> None:
    files = [DOCS / "configuration.md", *(DOCS / "configuration").iterdir()]
    found = {path.relative_to(DOCS).as_posix(): path.read_text(encoding="utf-8") for path in files}
    assert found == reference_pages(), "write them again: python -m lmi_server.explain.reference_page docs"


@pytest.mark.parametrize(
    ("key", "value", "titles"),
    [
        ("option.rolling_batch", "vllm", ["vllm"]),
        ("option.rolling_batch", "disable", ["huggingface pipeline"]),
        ("option.task", "text-embedding", ["vllm pooling", "huggingface pipeline"]),
        ("option.handler", "predict", ["a handler of one's own"]),
        ("option.output_formatter", "3p", ["a handler of one's own"]),
        ("option.mpi_mode", True, ["deepspeed", "huggingface"]),
        ("option.pipeline_parallel_degree", 2, ["vllm", "tensorrt_llm"]),
    ],
)
def test_no_value_that_a_handler_serves_is_called_unavailable(key: str, value: object, titles: list[str]) -> None:
    row = row_of(key)
    for title in titles:
        spec = HANDLERS.by_title(title)
        (option,) = (option for option in load_options_type(spec).declared_options() if option.key == key)
        assert not any(isinstance(mark, Unavailable) and mark.applies(value) for mark in option.marks)
        only, limited = (re.search(rf"{words} ([^:;]+)[:;]", row) for words in ("Only with", "Not available with"))
        assert only is None or title in only[1].split(", ")
        assert limited is None or title not in limited[1].split(", ")
    assert "Not available in this version" not in row


def test_a_limit_of_some_values_names_them() -> None:
    assert "more than 1" in row_of("option.pipeline_parallel_degree")
    assert "Not available in this version: the variables of visible devices" in row_of("option.env")


def test_a_limit_of_one_handler_stands_in_its_section() -> None:
    page = reference_pages()["configuration/tensorrt_llm.md"]
    assert "Not available in this version: `disable`; use trtllm" in page


def row_of(key: str) -> str:
    """Return the row of a key of every handler."""
    shared = reference_pages()["configuration/every-handler.md"]
    (row,) = (line for line in shared.splitlines() if line.startswith(f"| `{key}` |"))
    return row


def test_every_key_is_on_the_page() -> None:
    page = "\n".join(reference_pages().values())
    for declaring in (ServingOptions, *(load_options_type(spec) for spec in HANDLERS.specs)):
        assert [option.key for option in declaring.declared_options() if f"| `{option.key}` |" not in page] == []
