"""Every key that LMI documents is known here, with its default and its values; every other that LMI reads is too."""

from __future__ import annotations

import json
from typing import Any

import pytest
from paths import DATA
from pydantic import TypeAdapter, ValidationError

from lmi_server.configuration.declaration import Documented, Option, Options, written
from lmi_server.configuration.handlers import HANDLERS, HandlerSpec, load_options_type
from lmi_server.configuration.options import ModelOptions, ServingOptions

DOCUMENTED = json.loads((DATA / "documented_keys.json").read_text())
SPECS = {spec.title: spec for spec in (*HANDLERS.specs, HANDLERS.java)}
SECTIONS = {
    "DeepSpeed": "deepspeed",
    "HuggingFace Accelerate": "huggingface",
    "LMI-Dist": "lmi-dist",
    "vLLM": "vllm",
    "Transformers-NeuronX": "transformers_neuronx",
    "TensorRT-LLM": "tensorrt_llm",
}


def classes_of(section: str) -> tuple[type[Options], ...]:
    if section == "Common":
        return (ServingOptions, ModelOptions)
    return (load_options_type(SPECS[SECTIONS[section]]),)


def declared(key: str, *classes: type[Options]) -> tuple[type[Options], Option]:
    found = [(cls, option) for cls in classes for option in cls.declared_options() if key in option.keys]
    assert found, f"{key} is not declared"
    return found[0]


def agrees(option: Option, default: str) -> bool:
    here = [option.default, *(mark.default for mark in option.marks if isinstance(mark, Documented))]
    return any((written(value) or "none").lower() == default.lower() for value in here)


def rows_of(section: str) -> list[dict[str, Any]]:
    return [row for row in DOCUMENTED["tables"] if row["section"] == section]


def accepts(cls: type[Options], option: Option, raw: str) -> bool:
    try:
        return option.field in cls.model_validate({option.field: raw}).model_fields_set
    except ValidationError:
        return False


def test_the_sections_of_the_documents_are_these() -> None:
    assert {row["section"] for row in DOCUMENTED["tables"]} == {"Common", *SECTIONS}


@pytest.mark.parametrize("section", ["Common", *SECTIONS])
def test_the_keys_of_a_documented_table_are_known_with_their_defaults(section: str) -> None:
    differing = [
        f"{row['key']}: documented is {row['default']}, declared is {written(option.default)}"
        for row in rows_of(section)
        for _, option in [declared(row["key"], *classes_of(section))]
        if "default" in row and not agrees(option, row["default"])
    ]
    assert differing == []


@pytest.mark.parametrize("section", ["Common", *SECTIONS])
def test_every_documented_value_is_accepted(section: str) -> None:
    refused = [
        f"{row['key']}={raw}"
        for row in rows_of(section)
        for cls, option in [declared(row["key"], *classes_of(section))]
        for raw in row["allowed"]
        if not accepts(cls, option, raw)
    ]
    assert refused == []


def test_documented_defaults_that_differ_by_handler() -> None:
    differing = [
        f"{row['handler']}: {row['key']}: documented is {row['default']}, declared is {written(option.default)}"
        for row in DOCUMENTED["defaults per handler"]
        for _, option in [declared(row["key"], load_options_type(SPECS[row["handler"]]))]
        if written(option.default) != row["default"]
    ]
    assert differing == []


def test_keys_of_the_model_server() -> None:
    known = {key for option in ServingOptions.declared_options() for key in option.keys}
    assert set(DOCUMENTED["keys of the model server"]) - known == set()


@pytest.mark.parametrize("title", DOCUMENTED["further options"])
def test_further_options(title: str) -> None:
    classes = (ServingOptions, ModelOptions if title == "every handler" else load_options_type(SPECS[title]))
    known = {key for cls in classes for option in cls.declared_options() for key in option.keys}
    assert {f"option.{name}" for name in DOCUMENTED["further options"][title]} - known == set()


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_a_handlers_options_are_consistent(spec: HandlerSpec) -> None:
    cls = load_options_type(spec)
    keys = [key for option in (*ServingOptions.declared_options(), *cls.declared_options()) for key in option.keys]
    assert len(keys) == len(set(keys))
    for option in cls.declared_options():
        assert option.description.endswith("."), option.key
        assert "\n" not in option.description
        adapter = TypeAdapter(cls.model_fields[option.field].annotation)
        assert option.default is None or adapter.dump_python(option.default) is not None
        if option.default is not None:
            raw = written(option.default)
            assert getattr(cls.model_validate({option.field: raw}), option.field) == option.default
