"""Constraints become grammars within bounds; what is refused is named."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import pytest
from relay_helpers import on_loop
from tiny_models import byte_tokenizer
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from handlers.structured_output.compiler import GrammarCache
from handlers.structured_output.grammar_text import grammar_text
from handlers.structured_output.token_grammars import TokenGrammars
from lmi_server.contract.errors import RequestError
from lmi_server.contract.generation import StructuredOutputs

DEEP: Any = {"type": "integer"}
for _ in range(60):
    DEEP = {"type": "object", "properties": {"a": DEEP}}
TAG = {"begin": "<call>", "schema": {"type": "object"}, "end": "</call>"}
NEW_TAG = {"begin": "<call>", "content": {"type": "json_schema", "json_schema": {"type": "object"}}, "end": "</call>"}


def constraint(kind: Any, value: Any, **style: Any) -> StructuredOutputs:
    return StructuredOutputs(kind=kind, value=value, **style)


def refusal(kind: Any, value: Any) -> str:
    async def compile_alone() -> str:
        cache = GrammarCache(str)
        try:
            return await cache.get(constraint(kind, value))
        except RequestError as error:
            return str(error)
        finally:
            cache.stop()

    return asyncio.run(compile_alone())


@pytest.mark.parametrize(
    ("kind", "value", "said"),
    [
        ("json", {"type": "array", "items": {}, "minItems": 100_000}, "minItems: 100000 is not allowed; send 10000"),
        ("json", {"items": {"maxItems": 10**9}}, "items.maxItems: 1000000000 is not allowed; leave it out"),
        ("json", DEEP, "nested more than 100 levels"),
        ("json", {"enum": list(range(20_000))}, "enum: has 20000 entries, and may have 10000"),
        ("json", {"type": "object", "properties": {f"p{n}": {} for n in range(600)}}, "properties: has 600 properties"),
        ("json", json.dumps({"const": "a" * 300_000}), "the JSON schema has 300013 characters"),
        ("choice", [str(number) for number in range(20_000)], "choice has 20000 texts, and may have 10000"),
        ("regex", "a" * 40_000, "the regular expression has 40000 characters"),
        ("grammar", "hello", "send EBNF"),
        ("structural_tag", "{}", "structural_tag is not one that this server knows"),
    ],
)  # fmt: skip
def test_what_no_answer_needs_is_refused_by_name(kind: str, value: Any, said: str) -> None:
    with pytest.raises(RequestError) as refused:
        grammar_text(constraint(kind, value))
    assert said in str(refused.value)


def test_without_the_library_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "handlers.structured_output.grammar_text")
    monkeypatch.setitem(sys.modules, "llguidance", None)
    assert refusal("regex", "a") == (
        "the regular expression needs the package llguidance, which this server lacks; install it there, or leave the"
        " constraint out"
    )


@on_loop
async def test_what_the_library_cannot_compile_is_refused_in_its_words() -> None:
    cache = GrammarCache(str)
    wrong = [("regex", "(a"), ("regex", "(?=a)b"), ("json", {"type": "no such"}), ("grammar", 'root ::= "a" b')]
    wrong.append(("json", {"type": "array", "uniqueItems": True}))
    found = await asyncio.gather(*(cache.get(constraint(*one)) for one in wrong), return_exceptions=True)
    cache.stop()
    assert all(isinstance(error, RequestError) for error in found)
    unclosed, look, no_type, no_rule, unknown = [str(error) for error in found]
    assert "the regular expression cannot be compiled" in unclosed
    assert "unclosed group" in unclosed
    assert "look-ahead" in look
    assert "no such" in no_type
    assert "b" in no_rule
    assert "uniqueItems" in unknown
    assert "x-guidance" not in unknown


@pytest.mark.slow
@on_loop
async def test_a_grammar_that_takes_too_much_ends_a_process_of_its_own() -> None:
    """The library computes for half a minute here, and for the memory of the next one there is a bound."""

    cache = GrammarCache(str)
    slow = asyncio.create_task(cache.get(constraint("json", {"type": "integer", "multipleOf": 999_983})))
    fine = await cache.get(constraint("regex", "a+"))
    assert not slow.done()
    found = (await asyncio.gather(slow, return_exceptions=True))[0]
    again = await cache.get(constraint("regex", "b+"))  # with a new process
    cache.stop()
    assert again
    assert "takes more than 2 s or 1 GiB to compile; make it simpler" in str(found)
    assert "a+" in fine


def test_white_space_may_have_a_bound_for_all_requests() -> None:
    grammars = TokenGrammars(byte_tokenizer(), 259, [258])
    schema = {"type": "array", "items": {"const": 1}, "minItems": 2}

    async def takes(text: str, **style: Any) -> bool:
        cache = GrammarCache(grammars.compile, max_white_space=2)
        try:
            matcher = (await cache.get(constraint("json", schema, **style))).matcher.deep_copy()
        finally:
            cache.stop()
        return bool(matcher.consume_tokens(byte_tokenizer().encode(text)))

    assert asyncio.run(takes("[1,\n 1]"))
    assert not asyncio.run(takes("[1,\n  1]"))
    assert not asyncio.run(takes("[ 1,1]"))
    assert asyncio.run(takes("[1,    1]", whitespace_pattern="[ ]{0,4}"))
    assert not asyncio.run(takes("[1, 1]", disable_any_whitespace=True))


@on_loop
async def test_one_constraint_is_compiled_once_for_all_that_wait() -> None:
    made: list[str] = []

    cache = GrammarCache(lambda text: made.append(text) or text)
    leaves = asyncio.create_task(cache.get(constraint("regex", "a")))
    stays = [asyncio.create_task(cache.get(constraint("regex", "a"))) for _ in range(3)]
    await asyncio.sleep(0)
    leaves.cancel()
    assert len(set(await asyncio.gather(*stays))) == 1
    for number in range(40):
        await cache.get(constraint("regex", f"b{number}"))
    await cache.get(constraint("regex", "a"))  # forgotten meanwhile
    cache.stop()
    assert sum("/a/" in text for text in made) == 2


@pytest.mark.parametrize(
    "described",
    [
        {"type": "structural_tag", "structures": [TAG], "triggers": ["<call>"]},
        {"type": "structural_tag", "format": {"type": "triggered_tags", "tags": [NEW_TAG], "triggers": ["<call>"]}},
    ],
)
def test_both_forms_of_a_structural_tag_are_read(described: dict[str, Any]) -> None:
    assert "</call>" in refusal("structural_tag", json.dumps(described))


def test_a_grammar_may_name_special_tokens_of_the_model() -> None:
    assert "<|call|>" in refusal("grammar", 'start: <|call|> "a"')


def test_the_style_of_the_json_is_honoured() -> None:
    grammars = TokenGrammars(byte_tokenizer(), 259, [258])
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}

    def takes(text: str, **style: Any) -> bool:
        matcher = grammars.compile(grammar_text(constraint("json", schema, **style))).matcher.deep_copy()
        return bool(matcher.consume_tokens(byte_tokenizer().encode(text)))

    assert takes('{ "a":\n1}')
    assert takes('{"a":1,"b":2}')
    assert not takes('{"a":1,"b":2}', disable_additional_properties=True)
    assert takes('{"a":1}', disable_any_whitespace=True)
    assert not takes('{ "a":1}', disable_any_whitespace=True)
    for pattern in (" ?", "[ ]?", r"[\x20\n]{0,1}", r"\s?"):
        assert takes('{"a": 1}', whitespace_pattern=pattern)
        assert takes('{"a":1}', whitespace_pattern=pattern)
        assert not takes('{"a":  1}', whitespace_pattern=pattern)
        assert not takes('{"a":\u00a01}', whitespace_pattern=pattern)
    assert takes('{"a":   1, "b" :2}', whitespace_pattern=r"[ \n]{0,3}")
    assert takes('{"a":' + " " * 500 + "1}", whitespace_pattern="[ ]*")


@pytest.mark.parametrize("pattern", [" {3}", "[ ]+", "a?", "[^a]?", "(( ?){1000}){1000}", ".*", " ?" * 200])
def test_white_space_that_json_cannot_have_or_must_have_is_refused(pattern: str) -> None:
    with pytest.raises(RequestError, match=r"whitespace_pattern: .* is not allowed; send"):
        grammar_text(constraint("json", {}, whitespace_pattern=pattern))


@pytest.mark.parametrize(
    ("pattern", "matches", "others"),
    [
        (r"\d{3}-\d{4}", "555-1234", "\N{ARABIC-INDIC DIGIT FIVE}" * 3 + "-1234"),
        (r"[\d]+", "12", "\N{ARABIC-INDIC DIGIT ONE}"),
        (r"\w+", "a_1", "é"),
        (r"[^\d]", "\N{ARABIC-INDIC DIGIT THREE}", "3"),
        (r"\W", "é", "a"),
        (r"\D", "\N{ARABIC-INDIC DIGIT THREE}", "3"),
    ],
)
def test_digits_and_letters_of_a_pattern_are_those_of_json_schemas(pattern: str, matches: str, others: str) -> None:
    grammars = TokenGrammars(byte_tokenizer(), 259, [258])
    schema = {"type": "string", "pattern": f"^{pattern}$"}
    for kind, value, quote in (("regex", pattern, ""), ("json", schema, '"')):
        for text, expected in ((matches, True), (others, False)):
            matcher = grammars.compile(grammar_text(constraint(kind, value))).matcher.deep_copy()
            assert matcher.consume_tokens(byte_tokenizer().encode(quote + text + quote)) is expected


def test_a_tokenizer_that_cannot_be_used_says_so() -> None:
    class Slow:
        def __len__(self) -> int:
            return 10

    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    for tokenizer, ends in ((Slow(), [1]), (words, [])):
        with pytest.raises(RequestError, match="tokenizer cannot be used for structured output"):
            TokenGrammars(tokenizer, 10, ends).compile('start: "a"')
