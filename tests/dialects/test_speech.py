"""OpenAI's speech to text: what forms ask for, how texts and subtitles are written, and streams of them."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lmi_server.contract.errors import ContextLengthError, RequestError
from lmi_server.contract.protocol import Input
from lmi_server.dialects import parse, routes
from lmi_server.dialects.base import ServedModel
from lmi_server.dialects.errors import error_reply
from lmi_server.dialects.framing import SSE
from lmi_server.dialects.optional import optional_dialects
from lmi_server.dialects.speech.answer import EventWriter, write_answer
from lmi_server.dialects.speech.request import SpeechRequest, speech_error, speech_request

SOUND = b"RIFF\r\n--sound"
RESULT = {
    "text": " A fox.  It jumps. ",
    "duration": 3723.5,
    "language": "english",
    "chunks": [
        {"text": " A", "timestamp": [0.0, 0.5]},
        {"text": " fox.", "timestamp": [0.5, None]},
    ],
    "segments": [
        {"id": 0, "start": 0.0, "end": 1.25, "text": " A fox."},
        {"id": 1, "start": 1.25, "end": 1.5, "text": "  "},
        {"id": 2, "start": 59.9996, "end": 3723.5, "text": " It --> jumps.\n\n"},
    ],
}


def sent(route: str = routes.AUDIO_TRANSCRIPTIONS, file: bytes | None = SOUND, **fields: Any) -> Input:
    """Return a form with these fields; a name that ends with _s is that of a list."""
    data = {name.removesuffix("_s") + "[]" * name.endswith("_s"): value for name, value in fields.items()}
    files = {"file": ("sound.wav", file)} if file is not None else {"other": b""}
    request = httpx.Request("POST", "http://host", data=data, files=files)
    return Input(route, {"content-type": request.headers["content-type"]}, [("data", request.read())])


def parameters(request: Input) -> dict[str, Any]:
    _, read = speech_request(request)
    assert read.body() == SOUND
    assert read.properties["content-type"].startswith("audio/")
    found: dict[str, Any] = json.loads(dict(read.content)["parameters"])
    return found


def test_fields_become_parameters() -> None:
    asked = parameters(sent(model="m", language="de", prompt="a fox", temperature="0.5", num_beams="1"))
    expected = {"language": "de", "prompt": "a fox", "temperature": 0.5, "num_beams": 1, "return_duration": True}
    assert asked == expected
    assert parameters(sent(routes.AUDIO_TRANSLATIONS)) == {"task": "translate", "return_duration": True}


@pytest.mark.parametrize("shape", ["srt", "vtt", "verbose_json"])
def test_formats_with_times_ask_for_segments(shape: str) -> None:
    assert parameters(sent(response_format=shape)) == {"return_timestamps": True, "details": True}


@pytest.mark.parametrize("granularities", [["word"], ["segment", "word"], ["word", "word"]])
def test_words_are_asked_for(granularities: list[str]) -> None:
    request = sent(response_format="verbose_json", timestamp_granularities_s=granularities)
    assert parameters(request) == {"return_timestamps": "word", "details": True}


def test_a_stream_is_asked_for_as_events() -> None:
    _, read = speech_request(sent(stream="true"))
    assert read.properties["accept"] == "text/event-stream"
    assert parameters(sent(stream="true")) == {}
    assert speech_request(sent(stream="false"))[1].properties["accept"] == "application/json"


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (sent(file=None), "file is missing; send the file of a sound"),
        (sent(file=b""), "file is empty"),
        (sent(response_format="diarized_json"), 'response_format: "diarized_json" is not allowed; send json or text'),
        (sent(temperature="2"), "temperature: 2.0 is not allowed; send a number from 0 to 1"),
        (sent(stream="maybe"), 'stream: "maybe" is not allowed; send true or false'),
        (sent(stream="true", response_format="srt"), 'response_format: "srt" is not allowed; send json with stream'),
        (sent(timestamp_granularities_s=["word"]), "timestamp_granularities is for response_format=verbose_json"),
        (
            sent(timestamp_granularities_s=["char"], response_format="verbose_json"),
            'timestamp_granularities: "char" is not allowed; send segment or word',
        ),
        (sent(include_s=["logprobs"]), "include is not supported; log probabilities of tokens"),
        (sent(language=["de", "fr"]), "language is in the form more than once; send it once"),
        (sent(chunking_strategy="server_vad"), 'chunking_strategy: "server_vad" is not allowed; send auto'),
        (Input(routes.AUDIO_TRANSCRIPTIONS, {"content-type": "audio/wav"}, [("data", SOUND)]), '"audio/wav" is not a'),
        (
            Input(
                routes.AUDIO_TRANSCRIPTIONS,
                {"content-type": "application/x-www-form-urlencoded"},
                [("data", b"file=RIFF%00")],
            ),
            "is not a form; send multipart/form-data",
        ),
        (Input(routes.AUDIO_TRANSCRIPTIONS, {}, [("data", b"{}")]), "is not a form; send multipart/form-data"),
    ],
)
def test_what_cannot_be_served_is_refused_with_its_field(request_: Input, message: str) -> None:
    with pytest.raises(RequestError) as raised:
        speech_request(request_)
    assert message in raised.value.message


def test_unknown_fields_are_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    speech_request(sent(langauge="de"))
    assert "langauge is not known and is ignored; did you mean language?" in caplog.text


def test_errors_of_the_model_have_the_names_of_the_form() -> None:
    asked = SpeechRequest(response_format="srt")
    assert speech_error(asked, RequestError("inputs is no sound file: x")).message == "file is no sound file: x"
    assert speech_error(asked, RequestError("parameters.language: x")).message == "language: x"
    longer = speech_error(asked, ContextLengthError("parameters.prompt: x", 1, 2, 3))
    assert (type(longer), longer.message) == (ContextLengthError, "prompt: x")
    no_times = speech_error(asked, RequestError("parameters.return_timestamps: true is not allowed; send word"))
    assert no_times.message.startswith("response_format=srt has times that this model does not know; send json")
    status, _, body = error_reply(routes.AUDIO_TRANSCRIPTIONS, no_times)
    assert (status, json.loads(body)["error"]["type"]) == (400, "invalid_request_error")


def test_a_model_that_generates_text_refuses_sounds() -> None:
    with pytest.raises(RequestError, match="this model generates text and does not serve /v1/audio/transcriptions"):
        parse(sent(), ServedModel(name="m"))


# --- answers ---


def answered(shape: str, *granularities: str, translates: bool = False) -> tuple[str, str]:
    asked = SpeechRequest(response_format=shape, granularities=granularities, translates=translates)
    ((_, kind),), data = write_answer(asked, "m", msgspec.json.encode([RESULT]))
    return kind, data.decode()


def test_json_and_text_have_the_text_alone() -> None:
    kind, body = answered("json")
    assert kind == "application/json"
    assert json.loads(body) == {"text": "A fox.  It jumps.", "usage": {"type": "duration", "seconds": 3723.5}}
    assert answered("text") == ("text/plain; charset=utf-8", "A fox.  It jumps.\n")


def test_subtitles_have_a_cue_for_each_segment_with_words() -> None:
    first, second = "A fox.", "It -> jumps."
    assert answered("srt")[1] == (
        f"1\n00:00:00,000 --> 00:00:01,250\n{first}\n\n2\n00:01:00,000 --> 01:02:03,500\n{second}\n"
    )
    assert answered("vtt") == (
        "text/vtt; charset=utf-8",
        f"WEBVTT\n\n00:00:00.000 --> 00:00:01.250\n{first}\n\n00:01:00.000 --> 01:02:03.500\n{second}\n",
    )


@given(st.lists(st.tuples(st.floats(0, 1e5), st.floats(0, 1e5), st.text(max_size=20)), max_size=5))
@example([(0.0, 1.0, "a ---> b")])
def test_no_text_can_break_a_cue(cues: list[tuple[float, float, str]]) -> None:
    segments = [{"start": start, "end": end, "text": text} for start, end, text in cues]
    result = {"text": "", "duration": 1.0, "segments": segments}
    for shape in ("srt", "vtt"):
        asked = SpeechRequest(response_format=shape)
        data = write_answer(asked, "m", msgspec.json.encode([result]))[1].decode()
        spoken = [text for *_, text in cues if text.strip()]
        times = re.findall(r"^\d\d+:[0-5]\d:[0-5]\d[.,]\d{3} --> \d\d+:[0-5]\d:[0-5]\d[.,]\d{3}$", data, re.MULTILINE)
        assert len(times) == data.count("-->") == len(spoken)
        assert len([block for block in data.split("\n\n") if block.strip()]) == len(spoken) + (shape == "vtt")


def test_verbose_json_has_what_was_asked_for() -> None:
    body = json.loads(answered("verbose_json", "segment")[1])
    assert body["segments"] == RESULT["segments"]
    assert {name: body[name] for name in ("task", "language", "duration")} == {
        "task": "transcribe",
        "language": "english",
        "duration": 3723.5,
    }
    assert "words" not in body
    body = json.loads(answered("verbose_json", "word", translates=True)[1])
    assert body["words"] == [
        {"word": "A", "start": 0.0, "end": 0.5},
        {"word": "fox.", "start": 0.5, "end": 3723.5},
    ]
    assert body["task"] == "translate"
    assert "segments" not in body


@given(st.lists(st.text(alphabet=" ab\n\u2028é", max_size=4), max_size=6))
def test_the_deltas_of_a_stream_are_its_text(pieces: list[str]) -> None:
    writer = EventWriter(SpeechRequest(response_format="json"), "m")
    sent_events = b"".join([writer.piece(SSE.frame({"outputs": [piece]}) if piece else b"") for piece in pieces])
    events = [json.loads(line[6:]) for line in (sent_events + writer.end()).decode().split("\n\n") if line]
    *deltas, done = events
    assert all(event["type"] == "transcript.text.delta" and event["delta"] for event in deltas)
    assert done == {"type": "transcript.text.done", "text": "".join(pieces).strip()}
    assert "".join(event["delta"] for event in deltas) == done["text"]


def test_the_table_attaches_the_dialect() -> None:
    assert optional_dialects().paths["/v1/audio/transcriptions"] == routes.AUDIO_TRANSCRIPTIONS
    assert optional_dialects().body_types[routes.AUDIO_TRANSLATIONS] == ("multipart/form-data",)
