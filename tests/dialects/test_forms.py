"""The fields of forms: what is read, what is refused, and what is no form."""

from __future__ import annotations

import contextlib

import pytest
from growth import assert_linear

from lmi_server.contract.errors import BadParameterError
from lmi_server.dialects.forms import MAX_FIELDS, form_fields

URL_ENCODED = "application/x-www-form-urlencoded"
FORM_DATA = "multipart/form-data; boundary=XX"
FIELD = b'Content-Disposition: form-data; name="a"\r\n\r\n1\r\n'


def parts(*bodies: bytes) -> bytes:
    return b"".join(b"--XX\r\n" + body for body in bodies) + b"--XX--\r\n"


@pytest.mark.parametrize(
    ("content_type", "body", "fields"),
    [
        (URL_ENCODED, b"a=1&a=2&b", [("a", b"1"), ("a", b"2"), ("b", b"")]),
        (URL_ENCODED + "; charset=UTF-8", "é=ü&c=%E4%B8%AD".encode(), [("é", "ü".encode()), ("c", "中".encode())]),
        (URL_ENCODED, b"", []),
        (FORM_DATA, parts(FIELD), [("a", b"1")]),
        ('Multipart/Form-Data; charset=x; Boundary="XX"', parts(FIELD, FIELD), [("a", b"1"), ("a", b"1")]),
        (FORM_DATA, b"before\r\n" + parts(FIELD) + b"after", [("a", b"1")]),
        (FORM_DATA, parts(FIELD).replace(b"\r\n", b"\n"), [("a", b"1")]),
        (FORM_DATA, parts(FIELD).removesuffix(b"\r\n"), [("a", b"1")]),
        (FORM_DATA, parts(), []),
        (FORM_DATA, parts(b"Content-Disposition: form-data; name=a\r\n\r\n\r\n"), [("a", b"")]),
        (FORM_DATA, parts(b'content-disposition: form-data; filename="f"; name="a\\"b"\r\n\r\nx\r\n'), [('a"b', b"x")]),
        (FORM_DATA, parts(FIELD.replace(b'"a"', b'"\\a\\\\\\"\\\\b"')), [('a\\"\\b', b"1")]),
        (FORM_DATA, parts(b"X: y\r\n" + FIELD.replace(b'"a"', '"é"'.encode())), [("é", b"1")]),
        (FORM_DATA, parts(FIELD.replace(b"1", b"\r\n")), [("a", b"\r\n")]),
        (FORM_DATA, parts(FIELD.replace(b"1", b"1\n--XXX\n2")), [("a", b"1\n--XXX\n2")]),
        ("multipart/mixed; boundary=XX", parts(FIELD), [("a", b"1")]),
    ],
)  # fmt: skip
def test_fields(content_type: str, body: bytes, fields: list[tuple[str, bytes]]) -> None:
    assert form_fields(content_type, body) == fields


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        ("application/json", b"a=1"),
        (URL_ENCODED, b' {"a": 1}'),
        (URL_ENCODED, b"[1]"),
        ("multipart/form-data", b"a=1"),
        ("multipart/mixed; boundary=XX", parts(b"Content-Type: text/plain\r\n\r\n1\r\n")),
    ],
)
def test_a_body_that_is_no_form_is_taken_as_it_is(content_type: str, body: bytes) -> None:
    assert form_fields(content_type, body) is None


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "there is no --XX-- at its end"),
        (b"a=1", "there is no --XX-- at its end"),
        (parts(FIELD).removesuffix(b"--XX--\r\n"), "there is no --XX-- at its end"),
        (parts(b"nonsense\r\n"), "no empty line ends the headers of a part"),
        (parts(b"Content-Type: text/plain\r\n\r\n1\r\n"), "a part has no name"),
    ],
)
def test_a_body_that_is_not_the_form_it_should_be_is_refused(body: bytes, reason: str) -> None:
    with pytest.raises(BadParameterError, match=reason):
        form_fields(FORM_DATA, body)


# --- hostile forms ---


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        (URL_ENCODED, b"a=1&" * MAX_FIELDS + b"b"),
        (URL_ENCODED, b"&" * 1_000_000),
        (FORM_DATA, parts(*[FIELD] * (MAX_FIELDS + 1))),
        (FORM_DATA, b"--XXX\n" * (2 * MAX_FIELDS + 1)),
    ],
)
def test_a_form_has_a_bounded_number_of_fields(content_type: str, body: bytes) -> None:
    for only in (None, ("a",)):
        with pytest.raises(BadParameterError, match="more than 1000 fields"):
            form_fields(content_type, body, only)


def test_only_some_fields_are_decoded() -> None:
    body = b"a=%41&b=2&%61=3&c&=4&a+=5"
    assert form_fields(URL_ENCODED, body, ("a", "c")) == [("a", b"A"), ("a", b"3"), ("c", b"")]
    [(name, value)] = form_fields(URL_ENCODED, b"b=1&a=" + b"%41" * 100_000, ("a",)) or []
    assert name == "a"
    assert len(value) < 10_000


def test_only_some_parts_are_read() -> None:
    body = parts(FIELD, FIELD.replace(b'"a"', b'"b"'), FIELD.replace(b"1", b"2" * 100_000))
    [first, (name, value)] = form_fields(FORM_DATA, body, ("a",)) or []
    assert (first, name) == (("a", b"1"), "a")
    assert value == b"2" * len(value)
    assert len(value) < 10_000


@pytest.mark.parametrize("only", [None, ("a",)])
@pytest.mark.parametrize("part", ["%", "%41", "a", "+", "\u00e9"])
def test_a_form_is_read_in_linear_time(part: str, only: tuple[str, ...] | None) -> None:
    assert_linear(lambda text: form_fields(URL_ENCODED, f"a={text}".encode(), only), part)
    assert_linear(lambda text: form_fields(URL_ENCODED, f"{text}=a".encode(), only), part)


@pytest.mark.parametrize(
    "part", ["--XX", "\n--X", "\r", "\r\n", ";name=", ';name="', '\\"', "content-disposition:;", "; "]
)
def test_a_multipart_body_is_read_in_linear_time(part: str) -> None:
    def read(text: str) -> None:
        head = 'Content-Disposition: form-data; name="a'
        for body in (text, f"--XX\r\n{text}", f"--XX\r\n{head}{text}", f'--XX\r\n{head}"\r\n\r\n{text}\r\n--XX--'):
            with contextlib.suppress(BadParameterError):
                form_fields(FORM_DATA, body.encode())

    assert_linear(read, part)
