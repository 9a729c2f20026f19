"""JSON on one line, whatever a client takes for a line end."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmi_server.dialects.framing import JSON_LINES, SSE, Framing, encode_line


@given(st.text())
def test_a_line_is_one_line_to_every_reader(text: str) -> None:
    line = encode_line({"text": text}).decode()
    assert line.splitlines() == [line]
    assert json.loads(line) == {"text": text}


@pytest.mark.parametrize(("framing", "framed"), [(SSE, b'data: {"a":1}\n\n'), (JSON_LINES, b'{"a":1}\n')])
def test_frames(framing: Framing, framed: bytes) -> None:
    assert framing.frame({"a": 1}) == framed
