"""Writes what LMI's answer says: JSON, text, subtitles in SRT or WebVTT, or the events of a stream."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from lmi_server.dialects.framing import SSE, encode
from lmi_server.dialects.speech.request import SpeechRequest

_ARROW = re.compile("-{2,}>")
_TEXT = "text/plain; charset=utf-8"
_TYPES = {"text": _TEXT, "srt": _TEXT, "vtt": "text/vtt; charset=utf-8"}


def write_answer(asked: SpeechRequest, model: str, data: bytes) -> tuple[list[tuple[str, str]], bytes]:
    """Return headers and body of an answer; `data` is LMI's, a list of one result."""
    (result,) = msgspec.json.decode(data)
    kind = _TYPES.get(asked.response_format, "application/json")
    return [("content-type", kind)], _WRITERS[asked.response_format](asked, result)


def _plain_text(asked: SpeechRequest, result: Mapping[str, Any]) -> bytes:
    return f"{result['text'].strip()}\n".encode()


def _json(asked: SpeechRequest, result: Mapping[str, Any]) -> bytes:
    return encode({"text": result["text"].strip(), "usage": _usage(result)})


def _verbose_json(asked: SpeechRequest, result: Mapping[str, Any]) -> bytes:
    answer = {
        "task": "translate" if asked.translates else "transcribe",
        "language": "english" if asked.translates else result.get("language", ""),
        "duration": result["duration"],
        "text": result["text"].strip(),
    }
    if "word" in asked.granularities:
        answer["words"] = [_word(chunk, result["duration"]) for chunk in result.get("chunks", ())]
    if "segment" in asked.granularities:
        answer["segments"] = result["segments"]
    return encode({**answer, "usage": _usage(result)})


def _word(chunk: Mapping[str, Any], duration: float) -> dict[str, Any]:
    start, end = chunk["timestamp"]
    return {"word": chunk["text"].strip(), "start": start or 0.0, "end": duration if end is None else end}


def _usage(result: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "duration", "seconds": result["duration"]}


def _srt(asked: SpeechRequest, result: Mapping[str, Any]) -> bytes:
    parts = [f"{number}\n{_cue(segment, ',')}" for number, segment in enumerate(_segments_with_text(result), 1)]
    return "\n".join(parts).encode()


def _vtt(asked: SpeechRequest, result: Mapping[str, Any]) -> bytes:
    return "\n".join(["WEBVTT\n", *(_cue(segment, ".") for segment in _segments_with_text(result))]).encode()


def _segments_with_text(result: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return [segment for segment in result["segments"] if segment["text"].strip()]


def _cue(segment: Mapping[str, Any], point: str) -> str:
    """Return the times and the text of a segment, on one line: an arrow or an empty line in it would end the cue."""
    text = " ".join(segment["text"].strip().splitlines())
    text = _ARROW.sub("->", text)
    return f"{_clock(segment['start'], point)} --> {_clock(segment['end'], point)}\n{text}\n"


def _clock(seconds: float, point: str) -> str:
    milliseconds = round(seconds * 1000)
    minutes, milliseconds = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{milliseconds // 1000:02}{point}{milliseconds % 1000:03}"


_WRITERS = {"json": _json, "text": _plain_text, "srt": _srt, "verbose_json": _verbose_json, "vtt": _vtt}


class EventWriter:
    """Turns LMI's stream of texts into events. White space at either end of the whole text is left out."""

    def __init__(self, asked: SpeechRequest, model: str) -> None:
        self._parts: list[str] = []
        self._space = ""

    def piece(self, data: bytes) -> bytes:
        """Return the event of what a piece adds to the text; nothing if that is white space so far."""
        if not data:
            return b""
        (text,) = msgspec.json.decode(data[len(SSE.start) :])["outputs"]
        if not self._parts:
            text = text.lstrip()
        delta = (self._space + text).rstrip()
        self._space = (self._space + text)[len(delta) :]
        if not delta:
            return b""
        self._parts.append(delta)
        return SSE.frame({"type": "transcript.text.delta", "delta": delta})

    def end(self) -> bytes:
        """Return the event of the whole text."""
        return SSE.frame({"type": "transcript.text.done", "text": "".join(self._parts)})
