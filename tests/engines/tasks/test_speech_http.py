"""Speech to text over HTTP, with OpenAI's SDK and with curl, compared with transformers."""

from __future__ import annotations

import json
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pytest
import transformers
from pipeline_helpers import sound_file, speech
from server_helpers import Server, running
from tiny_tasks import make_task_model, whisper
from waiting import wait_until

if TYPE_CHECKING:
    import openai

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning"),  # the SDK's translations
]

TASK = "automatic-speech-recognition"
TRANSCRIPTIONS = "/v1/audio/transcriptions"
SHORT, LONG = speech(5), speech(62, seed=1)
FORMATS = ("json", "text", "srt", "verbose_json", "vtt")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("speech") / "store"
    (store / "whisper").mkdir(parents=True)
    whisper(store / "whisper", num_beams=1)
    (store / "whisper" / "serving.properties").write_text(f"option.task={TASK}\noption.max_media_size=20000000\n")
    make_task_model(TASK, store / "ctc")
    make_task_model("text-generation", store / "static")
    (store / "echo").mkdir()
    (store / "echo" / "serving.properties").write_text("option.entryPoint=djl_python.echo\n")
    return store


@pytest.fixture(scope="module")
def server(store: Path) -> Iterator[Server]:
    with running("--model-store", store, libraries="transformers", workers=len(list(store.iterdir()))) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    import openai

    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def library(store: Path) -> Any:
    return transformers.pipeline(TASK, model=str(store / "whisper"), device="cpu")


def segments_of(library: Any, samples: Any, task: str) -> list[tuple[float, float, str]]:
    """Return start, end and text of the segments that generate() finds in a long sound."""
    features = library.feature_extractor(
        samples,
        sampling_rate=16000,
        return_tensors="pt",
        return_attention_mask=True,
        truncation=False,
        padding="longest",
    )
    config = library.generation_config
    output = library.model.generate(**features, generation_config=config, return_segments=True, task=task)
    decode = library.tokenizer.decode
    return [
        (float(part["start"]), float(part["end"]), decode(part["tokens"], skip_special_tokens=True))
        for part in output["segments"][0]
    ]


@pytest.fixture(scope="module", params=["transcribe", "translate"])
def task(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def expected(library: Any, task: str) -> list[tuple[float, float, str]]:
    return segments_of(library, LONG, task)


@pytest.fixture(scope="module")
def text(library: Any, task: str) -> str:
    found = library(LONG, generate_kwargs={"task": task})["text"].strip()
    assert found
    return str(found)


@pytest.mark.parametrize("shape", FORMATS)
def test_the_sdk_gets_what_the_library_writes(
    client: openai.OpenAI, task: str, text: str, expected: list[tuple[float, float, str]], shape: Any
) -> None:
    resource: Any = client.audio.transcriptions if task == "transcribe" else client.audio.translations
    found = resource.create(model="whisper", file=("a.wav", sound_file(LONG)), response_format=shape)
    spoken = [(start, end, part.strip()) for start, end, part in expected if part.strip()]
    if shape == "text":
        assert found == f"{text}\n"
    elif shape == "json":
        assert found.text == text
    elif shape == "verbose_json":
        assert (found.text, float(found.duration)) == (text, 62.0)
        assert [(part.start, part.end, part.text) for part in found.segments] == [
            (pytest.approx(start), pytest.approx(end), part) for start, end, part in expected
        ]
        assert all(part.avg_logprob < 0 <= part.no_speech_prob <= 1 for part in found.segments)
    else:
        point = "," if shape == "srt" else "."
        cues = [f"{clock(start, point)} --> {clock(end, point)}\n{part}\n" for start, end, part in spoken]
        numbered = [f"{number}\n{cue}" for number, cue in enumerate(cues, 1)]
        assert found == "\n".join(numbered if shape == "srt" else ["WEBVTT\n", *cues])


def clock(seconds: float, point: str) -> str:
    return time.strftime("%H:%M:%S", time.gmtime(int(seconds + 1e-9))) + f"{point}{round(seconds % 1 * 1000):03}"


def test_the_sdk_gets_times_of_words(client: openai.OpenAI, library: Any) -> None:
    chunks = library(LONG, return_timestamps="word", generate_kwargs={"task": "transcribe", "language": "de"})["chunks"]
    found = client.audio.transcriptions.create(
        model="whisper",
        file=("a.wav", sound_file(LONG)),
        language="de",
        response_format="verbose_json",
        timestamp_granularities=["word"],
    )
    assert found.words is not None
    assert found.language == "german"
    assert found.segments is None
    assert [(word.word, word.start, word.end) for word in found.words] == [
        (chunk["text"].strip(), pytest.approx(chunk["timestamp"][0]), pytest.approx(chunk["timestamp"][1]))
        for chunk in chunks
    ]


def test_the_sdk_gets_a_stream(client: openai.OpenAI) -> None:
    sound = ("a.wav", sound_file(LONG))
    whole = client.audio.transcriptions.create(model="whisper", file=sound, temperature=0)
    with client.audio.transcriptions.create(model="whisper", file=sound, temperature=0, stream=True) as stream:
        *deltas, done = list(stream)
    assert [event.type for event in deltas] == ["transcript.text.delta"] * len(deltas)
    assert len(deltas) > 1
    assert done.type == "transcript.text.done"
    assert done.text == whole.text == "".join(getattr(event, "delta", "") for event in deltas)


@pytest.mark.parametrize(
    ("kind", "subtype"), [("WAV", "PCM_16"), ("FLAC", None), ("OGG", "VORBIS"), ("MP3", None), ("AIFF", "PCM_24")]
)
def test_curl_sends_any_kind_of_file(server: Server, tmp_path: Path, kind: str, subtype: str | None) -> None:
    file = tmp_path / "sound"
    file.write_bytes(sound_file(speech(5, rate=44100), 44100, kind, subtype))
    url = f"http://127.0.0.1:{server.port}{TRANSCRIPTIONS}"
    sent = ["-F", f"file=@{file}", "-F", "model=whisper", "-F", "response_format=verbose_json"]
    answer = json.loads(subprocess.check_output(["curl", "-s", *sent, url]))
    assert answer["duration"] == pytest.approx(5, abs=0.1)
    assert answer["segments"]


# --- errors ---


def post(server: Server, file: bytes | None = b"", path: str = TRANSCRIPTIONS, **fields: Any) -> httpx.Response:
    files = {} if file is None else {"file": ("a.wav", file)}
    return server.http.post(path, data={"model": "whisper", **fields}, files=files or {"other": b""})


@pytest.mark.parametrize(
    ("sent", "status", "message"),
    [
        ({"file": None}, 400, "file is missing"),
        ({"file": b"no sound"}, 400, "file is no sound file: "),
        ({"file": sound_file(SHORT[:0])}, 400, "file is a sound without samples"),
        ({"language": "xx"}, 400, 'language: "xx" is not allowed; send a code of de, en, fr, zh'),
        ({"prompt": "<|endoftext|>"}, 400, "prompt: Encountered text"),
        ({"num_beams": "99"}, 400, "num_beams: 99 is not allowed"),
        ({"file": sound_file(np.tile(SHORT, 80), subtype="PCM_16")}, 413, "option.max_media_size=20000000"),
        ({"model": "other"}, 404, "other"),
        ({"model": "static"}, 400, "the model serves text-generation, which /v1/audio/transcriptions is not for"),
        ({"model": "echo"}, 400, "this model generates text and does not serve /v1/audio/transcriptions"),
        ({"model": "ctc", "language": "de"}, 400, "language is for models of Whisper"),
        ({"model": "ctc", "response_format": "srt"}, 400, "response_format=srt has times that this model does not"),
    ],
)
def test_errors_name_the_field_in_openai_s_form(
    server: Server, sent: dict[str, Any], status: int, message: str
) -> None:
    answer = post(server, **{"file": sound_file(SHORT), **sent})
    error = answer.json()["error"]
    assert (answer.status_code, message in error["message"]) == (status, True), error
    assert error["type"] == "invalid_request_error"


def test_a_chat_is_refused_with_the_path_for_sounds(server: Server) -> None:
    answer = server.http.post("/v1/chat/completions", json={"model": "whisper", "messages": []})
    assert answer.status_code == 400
    assert "or the file of a sound to /v1/audio/transcriptions" in answer.json()["error"]["message"]


def test_a_body_that_is_no_form_is_refused(server: Server) -> None:
    for kind, body in (("application/json", b'{"model": "whisper"}'), ("audio/wav", sound_file(SHORT))):
        answer = server.http.post(TRANSCRIPTIONS, content=body, headers={"content-type": kind, "x-model": "whisper"})
        assert answer.status_code in (400, 404)
        assert answer.json()["error"]["message"]
    refused = server.http.get(TRANSCRIPTIONS)
    assert refused.status_code in (404, 405)


def test_a_model_of_one_pass_writes_texts_and_words(server: Server) -> None:
    answer = post(server, sound_file(SHORT), model="ctc")
    assert answer.json()["text"]
    words = post(
        server,
        sound_file(SHORT),
        model="ctc",
        response_format="verbose_json",
        **{"timestamp_granularities[]": "word"},
    )
    assert " ".join(word["word"] for word in words.json()["words"]) == answer.json()["text"]
    assert post(server, sound_file(SHORT), model="ctc", stream="true").text.count("data: ") == 2


def test_lmi_s_request_has_parameters_in_the_query(server: Server, library: Any) -> None:
    expected = library(SHORT, return_timestamps=True, generate_kwargs={"task": "translate"})
    query = {"parameters": json.dumps({"return_timestamps": True, "task": "translate"})}
    answer = server.http.post(
        "/predictions/whisper", params=query, content=sound_file(SHORT), headers={"content-type": "audio/wav"}
    )
    assert answer.json() == [json.loads(json.dumps(expected))]


def test_a_client_that_leaves_ends_its_transcription(server: Server) -> None:
    request = httpx.Request("POST", "http://a", data={"model": "whisper"}, files={"file": sound_file(speech(300))})
    body = request.read()
    head = f"POST {TRANSCRIPTIONS} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(f"{head}Content-Type: {request.headers['content-type']}\r\n\r\n".encode() + body)
        wait_until(lambda: server.metric("lmi_requests_in_flight", "whisper") == 1, "the request runs")
    wait_until(lambda: server.metric("lmi_requests_in_flight", "whisper") == 0, "its place is free")
    assert post(server, sound_file(SHORT)).status_code == 200


def test_the_document_describes_the_form(server: Server) -> None:
    described = server.http.get("/openapi.json").json()["paths"][TRANSCRIPTIONS]["post"]
    form = described["requestBody"]["content"]["multipart/form-data"]["schema"]
    assert form["properties"]["file"] == {"type": "string", "format": "binary"}
    assert "text/event-stream" in described["responses"]["200"]["content"]
