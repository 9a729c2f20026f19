"""What options name: each that takes free text says so, and a registration is checked by it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated

import pytest

from lmi_server.configuration.checks.registered_keys import references
from lmi_server.configuration.declaration import Option, Options
from lmi_server.configuration.engine import load_engine_type
from lmi_server.configuration.handlers import HANDLERS, load_options_type
from lmi_server.configuration.options import JsonObject, Names, PositiveInt, ServingOptions
from lmi_server.configuration.references import NAMES_NOTHING, NAMES_PATH, Kind

# Names that sound like a place or like code, of options that name neither.
_NAMES_NO_PLACE = {
    "option.served_model_name",
    "option.modelName",
    "option.modeName",
    "option.load_format",
    "option.tool_call_parser",
    "option.reasoning_parser",
    "option.exclude_modules",
    "option.lora_target_modules",
}
_SOUNDS_LIKE_A_PLACE = re.compile(
    r"path|file|dir|url|model_id|config$|template|tokenizer$|draft_model|adapters|cls$|plugin|module|connector|"
    r"entry|executable|env$|served|load_format|parser|modelName|modeName|library|dataset|checkpoint$",
    re.IGNORECASE,
)


def declared() -> Iterator[tuple[str, Option]]:
    for options in (ServingOptions, *map(load_options_type, HANDLERS)):
        for option in options.declared_options():
            yield options.__name__, option


def test_every_option_that_takes_free_text_says_what_it_names() -> None:
    silent = {f"{owner}: {option.key}" for owner, option in declared() if option.reference is None}
    assert not silent, "mark them with one of lmi_server/configuration/references.py"


def test_what_sounds_like_a_place_names_one() -> None:
    wrong = {
        f"{owner}: {key}"
        for owner, option in declared()
        for key in option.keys
        if option.reference == NAMES_NOTHING and takes_text(option) and _SOUNDS_LIKE_A_PLACE.search(key)
    }
    assert {entry for entry in wrong if entry.partition(": ")[2] not in _NAMES_NO_PLACE} == set()


def takes_text(option: Option) -> bool:
    return option.allowed in ("a text", "names separated by commas", "a JSON object")


def test_a_declaration_says_what_it_names() -> None:
    class Some(Options):
        number: PositiveInt | None = None
        free: str | None = None
        names: Names = ()
        text: JsonObject = "{}"
        plain: Annotated[str | None, NAMES_NOTHING] = None
        path: Annotated[Names, NAMES_PATH] = ()

    found = {option.key: option.reference for option in Some.declared_options()}
    assert found == {
        "number": NAMES_NOTHING,
        "free": None,
        "names": None,
        "text": None,
        "plain": NAMES_NOTHING,
        "path": NAMES_PATH,
    }


def test_of_several_handlers_the_strictest_counts_in_every_spelling() -> None:
    found = references()
    for _, option in declared():
        assert option.reference is not None
        assert all(found[key].kind >= option.reference.kind for key in option.keys)
    assert found["option.s3url"].kind is Kind.MODEL
    assert found["option.env"].kind is found["option.pythonExecutable"].kind is Kind.OPERATOR


def test_what_one_handler_declares_as_harmless_is_so_for_an_engine_that_gets_it_undeclared() -> None:
    """The table is that of all handlers, and an engine may have an argument of the same name."""
    harmless = {key for key, reference in references().items() if reference.kind is Kind.NOTHING}
    passed = set()
    for spec in HANDLERS:
        own = {key for option in load_options_type(spec).declared_options() for key in option.keys}
        passed |= {f"option.{name}" for name in load_engine_type(spec).argument_names()} - own
    reviewed = ("kv_cache_dtype", "lora_target_modules", "max_num_batched_tokens", "moe_backend", "quantization")
    reviewed += ("reasoning_parser", "skip_tokenizer_init", "tensor_parallel_size", "tokenizer_revision")
    assert passed & harmless <= {f"option.{name}" for name in reviewed}


@pytest.mark.parametrize("key", ["option.worker_cls", "option.hf_overrides", "option.model_loader_extra_config"])
def test_what_no_handler_declares_is_unknown(key: str) -> None:
    assert key not in references()
