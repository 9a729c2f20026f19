"""The lines of batches: split, parsed and written, whatever is in them."""

from __future__ import annotations

import json
import random
from itertools import pairwise

import pytest

from lmi_server.batches.lines import (
    LineError,
    answer_line,
    error_line,
    is_answered,
    parse_line,
    split_lines,
)

LIMIT = 1000
LONE = b'{"custom_id": "\\ud800", "url": "/v1/embeddings", "body": {}}'


def cut(data: bytes, seed: int) -> list[bytes]:
    """Cut bytes at random places."""
    places = sorted(random.Random(seed).choices(range(len(data) + 1), k=seed % 9))
    return [data[start:end] for start, end in pairwise([0, *places, len(data)])]


@pytest.mark.parametrize("seed", range(40))
def test_lines_do_not_depend_on_the_blocks(seed: int) -> None:
    values = random.Random(-seed)
    lines = [values.randbytes(values.choice((0, 1, 5, 30))).replace(b"\n", b"") for _ in range(12)]
    data = b"\n".join(lines)
    expected = [line if len(line) <= 20 else None for line in lines]
    if not lines[-1]:
        expected.pop()
    assert list(split_lines(cut(data, seed), 20)) == expected


def test_a_giant_line_takes_no_memory_and_the_next_one_is_read() -> None:
    blocks = (b"x" * 1000 for _ in range(5000))
    found = list(split_lines((*blocks, b"\nnext\n"), LIMIT))
    assert found == [None, b"next"]
    assert list(split_lines(iter([b"x" * 2000]), LIMIT)) == [None]


def test_a_mark_of_the_byte_order_is_no_part_of_the_first_line() -> None:
    assert list(split_lines([b"\xef\xbb\xbf{}\n\xef\xbb\xbf"], LIMIT)) == [b"{}", b"\xef\xbb\xbf"]


def test_a_body_without_a_priority_stays_as_it_is() -> None:
    body = b'{"a": 1.0, "a":\t[2], "stream": false}'
    line = parse_line(1, b'{"custom_id": "a", "url": "/v1/embeddings", "body": ' + body + b"}", LIMIT)
    assert line is not None
    assert line.body == body


def test_a_line_is_parsed_and_its_priority_has_no_effect() -> None:
    body = {"model": "m", "n": 12345678901234567890123, "x": 1e300, "priority": -5}
    data = json.dumps({"custom_id": "é", "method": "POST", "url": "/v1/embeddings", "body": body}).encode()
    line = parse_line(7, data, LIMIT)
    assert line is not None
    assert (line.number, line.custom_id, line.url) == (7, "é", "/v1/embeddings")
    assert json.loads(line.body) == {**body, "priority": None}
    assert parse_line(1, b" \t", LIMIT) is None


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"1",
        b'"x"',
        b"[" * 9000,
        b'{"custom_id": "\xff"}',
        LONE,
        b'{"custom_id": "a", "url": "/v1/embeddings"}',
        b'{"custom_id": "a", "url": "/v1/embeddings", "body": []}',
    ],
)
def test_anything_else_is_refused(data: bytes) -> None:
    if data:
        with pytest.raises(LineError) as raised:
            parse_line(1, data, LIMIT)
        assert raised.value.code == "invalid_json_line"


@pytest.mark.parametrize(
    ("data", "shown"),
    [
        (b'{"a":\n [1]}', {"a": [1]}),
        (b"plain\ntext", "plain\ntext"),
        (b"\xff", "\ufffd"),
        (b'{"a": "\xff"}', '{"a": "\ufffd"}'),
        (b'{"a": NaN}', '{"a": NaN}'),
        (b"[" * 9000, "[" * 9000),
        (b"", ""),
    ],
)
def test_an_answer_is_one_line_of_json(data: bytes, shown: object) -> None:
    line = answer_line("id", "é\n", 200, "r", data)
    assert b"\n" not in line
    assert json.loads(line)["response"] == {"status_code": 200, "request_id": "r", "body": shown}


def test_an_error_is_one_line_of_json() -> None:
    line = error_line("id", "a\nb", "batch_expired", "late\n")
    assert b"\n" not in line
    assert json.loads(line)["error"] == {"code": "batch_expired", "message": "late\n"}
    assert (is_answered(200), is_answered(400)) == (True, False)
