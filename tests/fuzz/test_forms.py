"""Forms: what a client's library writes is read as it was, and any other bytes are fields or an error."""

from __future__ import annotations

import json

import httpx
from fuzzing import TEXTS, budget
from hypothesis import example, given
from hypothesis import strategies as st

from lmi_server.contract.errors import RequestError
from lmi_server.contract.protocol import Input
from lmi_server.dialects import routes
from lmi_server.dialects.errors import error_reply
from lmi_server.dialects.forms import form_fields
from lmi_server.dialects.speech.request import FIELDS, FORMATS, speech_request

ROUTES = st.sampled_from(sorted(routes.AUDIO_ROUTES))
DELIMITER = b"--XX"
NAMES = st.sampled_from([*FIELDS, "timestamp_granularities[]", "file", "file[]", "", "x"])
FILES = st.lists(st.sampled_from([b"\r", b"\n", b"-", DELIMITER, b"\r\n" + DELIMITER, b"X", b"\x00"]), max_size=12)
PIECES = st.sampled_from(
    [
        b"\r\n",
        b"\n",
        DELIMITER,
        DELIMITER + b"--",
        b"Content-Disposition: form-data; name=",
        b'"file"',
        b'"stream"',
        b'"response_format"',
        b'; filename="a.wav"',
        b"true",
        b"\xff",
        b"a",
    ]
)


def form(fields: list[tuple[str, bytes]]) -> tuple[str, bytes]:
    """Return the content type and the body with which httpx sends these fields."""
    files = [(name, ("sound.wav", value)) for name, value in fields]
    request = httpx.Request("POST", "http://host", files=files)
    return request.headers["content-type"], request.read()


@budget(150)
@given(st.lists(st.tuples(st.text(min_size=1, max_size=6), FILES.map(b"".join)), min_size=1, max_size=5))
@example([('a"b\\', b"\r\n--")])
def test_what_a_library_writes_is_read(fields: list[tuple[str, bytes]]) -> None:
    kind, body = form(fields)
    found = form_fields(kind, body)
    assert found is not None
    assert [value for _, value in found] == [value for _, value in fields]
    if all(name.isalnum() for name, _ in fields):
        assert found == fields
        names = {name for name, _ in fields[::2]}
        assert form_fields(kind, body, names) == [field for field in fields if field[0] in names]


@budget(300)
@given(ROUTES, st.lists(PIECES, max_size=25).map(b"".join))
def test_any_bytes_are_a_form_or_an_error(route: str, body: bytes) -> None:
    answered(Input(route, {"content-type": "multipart/form-data; boundary=XX"}, [("data", body)]))


@budget(300)
@given(ROUTES, st.lists(st.tuples(NAMES, TEXTS | st.sampled_from([*FORMATS, "word", "true", "0.5"])), max_size=6))
def test_any_fields_are_a_request_or_an_error(route: str, fields: list[tuple[str, str]]) -> None:
    kind, body = form([(name, value.encode(errors="replace")) for name, value in fields]) if fields else ("", b"")
    answered(Input(route, {"content-type": kind}, [("data", body)]))


def answered(request: Input) -> None:
    """Read a request as a worker does, and write the error if it has one."""
    try:
        _, read = speech_request(request)
    except RequestError as error:
        failure = error
    else:
        assert read.body()
        return
    status, _, body = error_reply(request.route, failure)
    assert 400 <= status < 500
    assert json.loads(body)["error"]["message"]
