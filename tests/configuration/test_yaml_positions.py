"""YAML is read as plain data with lines, in bounded time and memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmi_server.configuration.model_file.positions import LONGEST, parse_documents, read_document
from lmi_server.contract.errors import ConfigurationError

LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
)
EMPTY_MERGES = f"e: &e {{}}\nm: &m {{<<: [{', '.join(['*e'] * 5000)}]}}\nz: {{<<: [{', '.join(['*m'] * 30)}]}}\n"
MERGES = "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n}\n  <<: [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))


def test_data_and_lines() -> None:
    [document] = parse_documents("a:\n  b: [1, x]\nbase: &base {c: 2}\nd:\n  <<: *base\n", "file")
    assert document.data == {"a": {"b": [1, "x"]}, "base": {"c": 2}, "d": {"c": 2}}
    assert document.lines[("a", "b", 1)] == 2
    assert document.lines[("d", "c")] == 3


def test_several_documents_have_their_own_lines(tmp_path: Path) -> None:
    text = "a: 1\n---\nb: 2\n"
    first, second = parse_documents(text, "file")
    assert (first.data, second.data, second.line(("b",))) == ({"a": 1}, {"b": 2}, 3)
    (tmp_path / "two.yaml").write_text(text)
    with pytest.raises(ConfigurationError, match=r"two\.yaml:3: is not valid YAML: a second document"):
        read_document(tmp_path / "two.yaml")


def test_an_unsaved_text_stands_for_the_file(tmp_path: Path) -> None:
    assert read_document(tmp_path / "missing.yaml", "a: 1").data == {"a": 1}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (LAUGHS, "has more than 100000 values"),
        (MERGES, "has more than 100000 values"),
        (EMPTY_MERGES, "has more than 100000 values"),
        ("a: &a [*a]", "nested too deeply"),
        ("a: &a {<<: *a}", "nested too deeply"),
        pytest.param("[" * 20_000, "nested too deeply", marks=pytest.mark.slow),
        ("x" * (LONGEST + 1), "is larger than"),
        ("a: 1" + ":0" * 2000, "too long for a number"),
        ("a: " + "9" * 4500, "too long for a number"),
        ("a: 2001-99-99", "not valid YAML"),
        ("a: !!python/object/apply:os.system [id]", None),
        ("a: !!int x", "not valid YAML"),
        ("? [1, 2]\n: x", "a key must be a text"),
        ("<<: 3", "<< takes a mapping"),
        ("a: 1\na: 2", "file:2: a is given twice"),
        ("a: [", "is not valid YAML"),
        ("\x00", "is not valid YAML"),
    ],
)
def test_hostile_texts_are_refused(text: str, message: str | None) -> None:
    if message is None:  # a tag of a list or a mapping is not looked at
        assert parse_documents(text, "file")[0].data == {"a": ["id"]}
        return
    with pytest.raises(ConfigurationError, match=message):
        parse_documents(text, "file")
