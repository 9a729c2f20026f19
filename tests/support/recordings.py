"""Answers of DJL Serving, recorded byte by byte: sends their requests again and compares what comes back."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import IO, Any

Address = tuple[str, int]

STAGGER_S = 0.03
"""The time between requests that were sent side by side."""

_READ_LIMIT_S = 60.0
_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
# Headers that differ from run to run, or that frame an answer whose body is compared.
_IGNORED_HEADERS = {"connection", "date", "server", "content-length", "x-request-id", "expires", "keep-alive"}
# Properties of a request that differ from run to run, or that this server has and DJL Serving has not.
_IGNORED_PROPERTIES = {"cluster_size", "x-request-id", "model_dir", "host", "requestid"}


@dataclass(frozen=True)
class Answer:
    """One answer. `body` is text in Latin-1, or only the number of bytes if the recorded body was too long to keep."""

    status: int
    headers: list[tuple[str, str]]
    body: str | int


@dataclass(frozen=True)
class Recording:
    """A request and the answers to it.

    `send` has the bytes of the request in Latin-1, and seconds to wait between parts of it. Recordings with the same
    `together` were sent side by side.
    """

    name: str
    send: list[str | float]
    answers: list[Answer]
    together: str | None

    @property
    def method(self) -> str:
        return str(self.send[0]).split(" ", 1)[0]

    @property
    def final_answers(self) -> int:
        """The number of answers without the informational ones, such as "100 Continue"."""
        return sum(answer.status >= 200 for answer in self.answers)


def read_recordings(path: Path) -> list[Recording]:
    return [_recording(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def _recording(line: Mapping[str, Any]) -> Recording:
    answers = [
        Answer(answer["status"], [(name, value) for name, value in answer["headers"]], answer["body"])
        for answer in line["answers"]
    ]
    return Recording(line["name"], line["send"], answers, line.get("together"))


def read_expected(path: Path) -> dict[str, str]:
    """Return the reasons of the differences on purpose by the names of their recordings.

    A line is `name # reason`; other lines that begin with "#" are headings.
    """
    lines = (line for line in path.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#"))
    parts = (line.partition(" # ") for line in lines)
    return {name.strip(): reason.strip() for name, _, reason in parts}


def replay(address: Address, recordings: Iterable[Recording]) -> dict[str, list[str]]:
    """Send recorded requests again, one after the other; return what differs by the name of the recording.

    Recordings of one name count as one.
    """
    found: dict[str, list[str]] = {}
    for _, group in groupby(enumerate(recordings), key=lambda numbered: numbered[1].together or numbered[0]):
        together = [recording for _, recording in group]
        for recording, answers in zip(together, _ask_together(address, together), strict=True):
            found.setdefault(recording.name, []).extend(_differences(recording, answers))
    return found


def _ask_together(address: Address, recordings: Sequence[Recording]) -> list[list[Answer] | str]:
    with ThreadPoolExecutor(len(recordings)) as threads:
        asked = []
        for recording in recordings:
            asked.append(threads.submit(_ask, address, recording))
            if recording is not recordings[-1]:
                time.sleep(STAGGER_S)
        return [future.result() for future in asked]


def _ask(address: Address, recording: Recording) -> list[Answer] | str:
    """Send one request; return the answers to it, or the name of the error of the connection."""
    try:
        with socket.create_connection(address, _READ_LIMIT_S) as connection, connection.makefile("rb") as stream:
            for part in recording.send:
                if isinstance(part, str):
                    connection.sendall(part.encode("latin-1"))
                else:
                    time.sleep(part)
            return list(_read_answers(stream, recording.method, recording.final_answers))
    except (OSError, ValueError, IndexError) as error:
        return type(error).__name__


def _read_answers(stream: IO[bytes], method: str, count: int) -> Iterator[Answer]:
    """Yield answers until `count` of them were not informational, or the stream ends."""
    while count and (line := stream.readline()):
        status = int(line.split(b" ", 2)[1])
        headers = list(_read_headers(stream))
        has_body = method != "HEAD" and status >= 200 and status not in (204, 304)
        body = _read_body(stream, dict(headers)) if has_body else b""
        yield Answer(status, headers, body.decode("latin-1"))
        count -= status >= 200


def _read_headers(stream: IO[bytes]) -> Iterator[tuple[str, str]]:
    while (line := stream.readline()) not in (b"\r\n", b"\n", b""):
        name, _, value = line.decode("latin-1").partition(":")
        yield name.lower(), value.strip()


def _read_body(stream: IO[bytes], headers: Mapping[str, str]) -> bytes:
    if "chunked" in headers.get("transfer-encoding", ""):
        return b"".join(_read_chunks(stream))
    if "content-length" in headers:
        return stream.read(int(headers["content-length"]))
    return stream.read()


def _read_chunks(stream: IO[bytes]) -> Iterator[bytes]:
    while size := int(stream.readline().split(b";")[0] or b"0", 16):
        yield stream.read(size)
        stream.readline()
    stream.readline()


def _differences(recording: Recording, answers: list[Answer] | str) -> Iterator[str]:
    if isinstance(answers, str):
        yield f"no answer: {answers}"
        return
    recorded = [answer.status for answer in recording.answers]
    statuses = [answer.status for answer in answers]
    if statuses != recorded:
        yield f"status {recorded} became {statuses}: {answers[-1].body if answers else ''}"
        return
    for before, after in zip(recording.answers, answers, strict=True):
        yield from _header_differences(before.headers, after.headers)
        yield from _body_differences(before.body, str(after.body))


def _header_differences(before: list[tuple[str, str]], after: list[tuple[str, str]]) -> Iterator[str]:
    recorded, received = _by_name(before), _by_name(after)
    for name in sorted(recorded.keys() | received.keys()):
        old, new = recorded.get(name, []), received.get(name, [])
        if old[-1:] != new[-1:] or len(new) > max(1, len(old)):
            yield f"header {name}: {old} became {new}"


def _by_name(headers: list[tuple[str, str]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, value in headers:
        if name not in _IGNORED_HEADERS:
            found.setdefault(name, []).append(_UUID.sub("<uuid>", value))
    return found


def _body_differences(before: str | int, after: str) -> Iterator[str]:
    if isinstance(before, int):
        if before != len(after):
            yield f"body of {before} bytes became one of {len(after)}"
    elif _comparable(before) != _comparable(after):
        yield f"body {before[:1000]!r} became {after[:1000]!r}"


def _comparable(body: str) -> Any:
    """Return a body without what may differ.

    This is the white space and the order of JSON, ids, bytes for a bytearray, the letter case of the properties of a
    request, and the wording of an error, but not its code and its type.
    """
    text = _UUID.sub("<uuid>", body).replace("bytearray", "bytes")
    try:
        value = json.loads(text)
    except ValueError:
        return text
    if not isinstance(value, dict):
        return value
    if "code" in value and "message" in value:
        return {key: value[key] for key in ("code", "type") if key in value}
    if isinstance(value.get("props"), dict):
        properties = {name.lower(): text for name, text in value["props"].items()}
        return value | {"props": {k: v for k, v in properties.items() if k not in _IGNORED_PROPERTIES}}
    return value
