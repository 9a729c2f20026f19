"""Reads a form with the file of a sound, and makes LMI's request for automatic-speech-recognition of it."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import Any, NoReturn

import msgspec

from lmi_server.contract.errors import LmiServerError, RequestError
from lmi_server.contract.protocol import Input
from lmi_server.contract.texts.quoting import excerpt
from lmi_server.dialects import fields, routes
from lmi_server.dialects.base import ServedModel
from lmi_server.dialects.fields import Field
from lmi_server.dialects.forms import form_fields
from lmi_server.dialects.framing import SSE, encode

logger = logging.getLogger(__name__)

FORMATS = ("json", "text", "srt", "verbose_json", "vtt")
_STREAMED = ("json", "text")
_WITH_TIMES = ("srt", "verbose_json", "vtt")
_FILE = "file"
_LISTS = ("timestamp_granularities", "include")
_GRANULARITIES = ("segment", "word")
_NO_FILE = "file is missing; send the file of a sound as a part of a form (multipart/form-data) with the name file"


class SpeechRequest(msgspec.Struct, frozen=True, kw_only=True):
    """How the answer is to be written."""

    response_format: str
    granularities: tuple[str, ...] = ()
    translates: bool = False


def refuse_generation(request: Input, served: ServedModel) -> NoReturn:
    """Raise RequestError: the model generates text."""
    raise RequestError(
        f"this model generates text and does not serve /v1/{request.route}; serve a model of the task"
        " automatic-speech-recognition, such as Whisper"
    )


def speech_request(request: Input) -> tuple[SpeechRequest, Input]:
    """Return how to answer, and the request in LMI's form: the file, and parameters beside it. Raises RequestError."""
    file, sent = _read_form(request)
    values, unknown = fields.read_fields(sent, FIELDS)
    for warning in fields.unknown_warnings(unknown, FIELDS):
        logger.warning("request %s: %s", request.request_id, warning)
    shape, granularities = values.pop("response_format", "json"), values.pop("granularities", ())
    stream = values.pop("stream", False)
    if stream and shape not in _STREAMED:
        raise fields.not_allowed("response_format", shape, "send json with stream=true, which has no times")
    if granularities and shape != "verbose_json":
        raise RequestError("timestamp_granularities is for response_format=verbose_json; send that, or leave it out")
    translates = request.route == routes.AUDIO_TRANSLATIONS
    asked = SpeechRequest(response_format=shape, granularities=granularities or ("segment",), translates=translates)
    parameters = {**values, **_of_answer(asked, stream), **({"task": "translate"} if translates else {})}
    properties = {**request.properties, "content-type": "audio/unknown", "accept": _ANSWER_TYPES[stream]}
    content = [("parameters", encode(parameters)), ("data", file)]
    return asked, msgspec.structs.replace(request, properties=properties, content=content)


_ANSWER_TYPES = {False: "application/json", True: SSE.content_type}


def _of_answer(asked: SpeechRequest, stream: bool) -> dict[str, Any]:
    """Return the parameters that give a result the contents of its format."""
    if asked.response_format in _WITH_TIMES:
        return {"return_timestamps": "word" if "word" in asked.granularities else True, "details": True}
    return {} if stream else {"return_duration": True}


def speech_error(asked: SpeechRequest, error: LmiServerError) -> LmiServerError:
    """Return an error about LMI's fields with the names that they have in the form."""
    message = error.message
    if message.startswith("parameters.return_timestamps"):
        message = (
            f"response_format={asked.response_format} has times that this model does not know; send json or text, or"
            f" verbose_json with other timestamp_granularities ({message.removeprefix('parameters.')})"
        )
    renamed = copy.copy(error)
    renamed.message = _FILE + message[len(_INPUTS) :] if message.startswith(_INPUTS) else message
    renamed.message = renamed.message.removeprefix("parameters.")
    return renamed


_INPUTS = "inputs"


def _read_form(request: Input) -> tuple[bytes, dict[str, Any]]:
    """Return the file and the other fields, lists under their name without brackets. Raises RequestError."""
    kind = request.properties.get("content-type", "")
    # Percent-encoding is no form of a file: it breaks the bytes, and decoding them would take seconds.
    sent = form_fields(kind, request.body()) if kind.lstrip().lower().startswith("multipart/") else None
    if sent is None:
        shown = fields.show(kind.partition(";")[0])
        raise RequestError(f"Content-Type: {shown} is not a form; send multipart/form-data with a part named file")
    found: dict[str, Any] = {}
    for name, value in sent:
        name = name.removesuffix("[]")
        if name in _LISTS:
            found.setdefault(name, []).append(_text(name, value))
        elif name in found:
            raise RequestError(f"{excerpt(name)} is in the form more than once; send it once")
        else:
            found[name] = value if name == _FILE else _text(name, value)
    file = found.pop(_FILE, None)
    if not file:
        raise RequestError(_NO_FILE if file is None else "file is empty; send the bytes of a sound")
    return file, found


def _text(name: str, value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise RequestError(f"{excerpt(name)} is not valid UTF-8; send text in UTF-8") from None


# --- readers ---


_GRANULARITY = fields.one_of(*_GRANULARITIES)


def _granularities(name: str, value: Any) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_GRANULARITY(name, item) for item in fields.strings(name, value)))


FIELDS: Mapping[str, Field] = {
    "model": Field(None, fields.string),
    "language": Field("language", fields.string),
    "prompt": Field("prompt", fields.string),
    "response_format": Field("response_format", fields.one_of(*FORMATS)),
    "temperature": Field("temperature", fields.number(lambda value: 0 <= value <= 1, "a number from 0 to 1")),
    "timestamp_granularities": Field("granularities", _granularities),
    "stream": Field("stream", fields.boolean),
    "num_beams": Field("num_beams", fields.integer(1)),
    "chunking_strategy": Field(None, fields.one_of("auto")),
    "include": Field(None, fields.off("log probabilities of tokens are not in the answers; leave it out")),
    "user": Field(None, fields.ignored),
}
BODY: dict[str, Any] = {
    "type": "object",
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "model": {"type": "string"},
        "language": {"type": "string"},
        "prompt": {"type": "string"},
        "response_format": {"enum": list(FORMATS)},
        "temperature": {"type": "number", "minimum": 0, "maximum": 1},
        "timestamp_granularities[]": {"type": "array", "items": {"enum": list(_GRANULARITIES)}},
        "stream": {"type": "boolean"},
        "num_beams": {"type": "integer", "minimum": 1},
    },
    "required": ["file"],
}
"""The schema of a form, for the OpenAPI document."""
