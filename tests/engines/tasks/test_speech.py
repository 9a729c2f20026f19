"""Speech recognition on small models, compared with what transformers answers itself."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from pipeline_helpers import approximately, ask, request, sound_file, speech, started
from relay_helpers import on_loop
from tiny_tasks import make_task_model, whisper

from handlers.tasks.handler import PipelineHandler
from handlers.tasks.speech.segments import certain_tokens
from handlers.tasks.speech.service import SpeechService
from handlers.tasks.speech.whisper import Whisper
from lmi_server.contract.errors import LmiServerError, RequestError
from lmi_server.contract.protocol import Input

pytestmark = [
    pytest.mark.slow,
    # The library goes on behind the end of a short sound, where words have no times.
    pytest.mark.filterwarnings(r"ignore:std\(\). degrees of freedom:UserWarning"),
]

TASK = "automatic-speech-recognition"
SHORT, LONG = speech(5), speech(62, seed=1)
SOUNDS = {"short": SHORT, "long": LONG}


def whisper_model(directory: Path, **arguments: Any) -> Path:
    """Make a directory with a small Whisper."""
    directory.mkdir(parents=True)
    whisper(directory, **arguments)
    (directory / "serving.properties").write_text(f"option.task={TASK}\noption.rolling_batch=disable\n")
    return directory


def service_of(handler: Any) -> SpeechService:
    found = handler.concurrent_handler()
    assert isinstance(found, SpeechService)
    return found


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return whisper_model(tmp_path_factory.mktemp("whisper") / "model")


@pytest.fixture(scope="module")
def handler(directory: Path) -> Any:
    return started(directory)


@pytest.fixture(scope="module")
def task(handler: Any) -> Whisper:
    assert isinstance(handler.task, Whisper)
    return handler.task


@pytest.fixture(scope="module")
def library(directory: Path) -> Any:
    return transformers.pipeline(TASK, model=str(directory), device="cpu")


def of_generate(pipeline: Any, parameters: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of generate() that say the same as parameters of a request."""
    names = ("language", "num_beams", "temperature", "condition_on_prev_tokens")
    arguments = {name: parameters[name] for name in names if name in parameters}
    if "prompt" in parameters:
        arguments["prompt_ids"] = pipeline.tokenizer.get_prompt_ids(parameters["prompt"], return_tensors="pt")
    return {"task": parameters.get("task", "transcribe"), **arguments}


CASES: list[dict[str, Any]] = [
    {},
    {"return_timestamps": "word", "num_beams": 1},
    {"return_timestamps": True, "num_beams": 1},
    {"return_timestamps": True, "language": "de", "task": "translate", "prompt": "a fox", "num_beams": 2},
    {"language": "french", "num_beams": 1, "temperature": 0.0},
    {"condition_on_prev_tokens": True, "num_beams": 1},
    {"condition_on_prev_tokens": True, "num_beams": 2, "prompt": "a fox", "return_timestamps": True},
]


@pytest.mark.parametrize("sound", SOUNDS)
@pytest.mark.parametrize("parameters", CASES, ids=str)
def test_whisper_writes_what_the_library_does(
    handler: Any, library: Any, sound: str, parameters: dict[str, Any]
) -> None:
    times = {name: value for name, value in parameters.items() if name == "return_timestamps"}
    expected = library(SOUNDS[sound], generate_kwargs=of_generate(library, parameters), **times)
    assert expected["text"].strip()
    assert ask_about(handler, SOUNDS[sound], **parameters) == json.loads(json.dumps(expected))


def ask_about(handler: Any, samples: np.ndarray, **parameters: Any) -> Any:
    """Return the result for a sound, whose file is the body."""
    (outcome,) = handler.handle([with_parameters(samples, parameters)])
    if isinstance(outcome, LmiServerError):
        raise outcome
    (result,) = json.loads(outcome.data)
    return result


def with_parameters(samples: np.ndarray, parameters: dict[str, Any], **headers: str) -> Input:
    content = [("parameters", json.dumps(parameters).encode()), ("data", sound_file(samples))]
    return Input("invocations", {"content-type": "audio/wav", **headers}, content)


def test_sampling_is_the_library_s(handler: Any, task: Whisper, library: Any) -> None:
    features = library.feature_extractor(SHORT, sampling_rate=16000, return_tensors="pt", return_attention_mask=True)
    torch.manual_seed(3)
    tokens = library.model.generate(
        **features, generation_config=library.generation_config, task="transcribe", temperature=0.8
    )
    torch.manual_seed(3)
    assert ask_about(handler, SHORT, temperature=0.8)["text"] == task.text_of(tokens[0].tolist())


def test_chunks_are_the_library_s(handler: Any, library: Any) -> None:
    expected = library(
        LONG, chunk_length_s=20, stride_length_s=(4, 2), generate_kwargs={"task": "transcribe", "num_beams": 1}
    )
    found = ask_about(handler, LONG, chunk_length_s=20, stride_length_s=[4, 2], num_beams=1)
    assert found == json.loads(json.dumps(expected))


@pytest.mark.parametrize("sound", SOUNDS)
@pytest.mark.parametrize("times", [True, "word"])
def test_segments_are_those_of_generate(handler: Any, library: Any, sound: str, times: Any) -> None:
    samples = SOUNDS[sound]
    long = {"truncation": False, "padding": "longest"} if sound == "long" else {}
    features = library.feature_extractor(
        samples, sampling_rate=16000, return_tensors="pt", return_attention_mask=True, **long
    )
    arguments = {"num_beams": 1, "task": "transcribe", "return_timestamps": True, "return_segments": True}
    config = library.generation_config
    (expected,) = library.model.generate(**features, **arguments, generation_config=config)["segments"]
    found = ask_about(handler, samples, return_timestamps=times, details=True, num_beams=1)
    assert found["duration"] == len(samples) / 16000
    assert found["language"] in ("english", "german", "french", "chinese")
    assert [segment["tokens"] for segment in found["segments"]] == [part["tokens"].tolist() for part in expected]
    for segment, part in zip(found["segments"], expected, strict=True):
        assert segment["start"] == pytest.approx(float(part["start"]))
        assert segment["end"] == pytest.approx(float(part["end"]))
        assert segment["text"] == library.tokenizer.decode(part["tokens"], skip_special_tokens=True)
    assert "".join(segment["text"] for segment in found["segments"]) == found["text"]
    assert [segment["id"] for segment in found["segments"]] == list(range(len(expected)))


def test_scores_are_the_model_s_own(handler: Any, library: Any) -> None:
    found = ask_about(handler, SHORT, details=True, num_beams=1, language="en")
    (segment,) = found["segments"]
    tokenizer = library.tokenizer
    start = ["<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|notimestamps|>"]
    begin, end = tokenizer.convert_tokens_to_ids(start), tokenizer.eos_token_id
    written = segment["tokens"]
    limit = library.model.generation_config.max_length
    sequence = torch.tensor([[*begin, *written, *([end] if len(begin) + len(written) < limit + 4 else [])]])
    features = library.feature_extractor(SHORT, sampling_rate=16000, return_tensors="pt").input_features
    with torch.inference_mode():
        logits = library.model(input_features=features, decoder_input_ids=sequence[:, :-1]).logits[0]
    chosen = logits[3:].log_softmax(-1).gather(1, sequence[0, 4:, None])
    assert segment["avg_logprob"] == pytest.approx(chosen.mean().item(), abs=1e-4)
    silent = logits[0].softmax(-1)[tokenizer.convert_tokens_to_ids("<|nospeech|>")].item()
    assert segment["no_speech_prob"] == pytest.approx(silent, rel=1e-3)
    assert segment["compression_ratio"] > 0


def test_windows_read_on_where_the_model_s_files_say_so(tmp_path: Path, handler: Any) -> None:
    directory = whisper_model(tmp_path / "model", condition_on_prev_tokens=True)
    reading, library = started(directory), transformers.pipeline(TASK, model=str(directory), device="cpu")
    expected = library(LONG, generate_kwargs={"task": "transcribe", "num_beams": 1})
    assert ask_about(reading, LONG, num_beams=1) == expected
    alone = ask_about(handler, LONG, num_beams=1)
    assert alone != expected
    assert ask_about(reading, LONG, num_beams=1, condition_on_prev_tokens=False) == alone
    sampled = {"temperature": 0.9, "num_beams": 1}
    assert not reading.task.begin(LONG, sampled).reads_on


def test_sounds_in_one_step_get_what_they_get_alone(task: Whisper) -> None:
    parameters = {"return_timestamps": True, "num_beams": 1}
    sounds = [LONG, speech(33, seed=5), speech(65, seed=6), SHORT]
    alone = [task.run([samples], parameters)[0] for samples in sounds]
    together = [task.begin(samples, parameters) for samples in sounds]
    for one in together:
        task.advance([one])  # its features
    steps = 0
    while left := [one for one in together if one.result is None]:
        alike = [one for one in left if one.key == left[0].key]
        steps += len(alike) > 1
        task.advance(alike)
    assert steps, "some windows were computed together"
    assert [one.result for one in together] == alone


def test_times_of_words_leave_the_attention_as_it_was(handler: Any, task: Whisper) -> None:
    before = ask_about(handler, SHORT, num_beams=1), task.model.config._attn_implementation
    ask_about(handler, SHORT, return_timestamps="word", num_beams=1)
    assert (ask_about(handler, SHORT, num_beams=1), task.model.config._attn_implementation) == before


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"language": "xx"}, 'parameters.language: "xx" is not allowed; send a code of de, en, fr, zh'),
        ({"language": "es"}, 'parameters.language: "es" is not allowed'),
        ({"task": "sing"}, 'parameters.task: "sing" is not allowed; send transcribe or translate'),
        ({"prompt": "<|endoftext|>"}, "parameters.prompt: Encountered text in the prompt corresponding to disallowed"),
        ({"temperature": -1}, "parameters.temperature: -1 is not allowed"),
        ({"num_beams": 99}, "parameters.num_beams: 99 is not allowed; send an integer from 1 to 16"),
        ({"return_timestamps": "char"}, 'parameters.return_timestamps: "char" is not allowed; send true'),
        ({"chunk_length_s": 1, "stride_length_s": 0.5}, "parameters.stride_length_s: 0.5 and 0.5 of chunks of 1.0"),
        ({"stride_length_s": 2}, "parameters.stride_length_s is of chunks; send chunk_length_s with it"),
        ({"chunk_length_s": 10, "details": True}, "parameters.chunk_length_s: details are of whole sounds"),
        (
            {"chunk_length_s": 10, "condition_on_prev_tokens": True},
            "parameters.condition_on_prev_tokens: chunks do not read each other",
        ),
    ],
)
def test_parameters_that_do_not_fit_are_refused(handler: Any, parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as raised:
        ask_about(handler, SHORT, **parameters)
    assert message in raised.value.message


def test_a_long_prompt_is_cut_to_its_end(handler: Any) -> None:
    end = "the last words count alone"
    assert ask_about(handler, SHORT, prompt="x" * 100_000 + end, num_beams=1) == ask_about(
        handler, SHORT, prompt="y" * 3 + end, num_beams=1
    )


def test_parameters_beside_a_file_must_be_json(handler: Any) -> None:
    content = [("parameters", b"{"), ("data", sound_file(SHORT))]
    (outcome,) = handler.handle([Input("invocations", {"content-type": "audio/wav"}, content)])
    assert isinstance(outcome, RequestError)
    assert outcome.message.startswith("parameters in the query are not JSON")


# --- models that know less ---


def test_a_model_of_english_takes_english_alone(tmp_path: Path) -> None:
    handler = started(whisper_model(tmp_path / "english", english_only=True))
    expected = ask_about(handler, SHORT, num_beams=1)
    assert ask_about(handler, SHORT, num_beams=1, language="en", task="transcribe") == expected
    with pytest.raises(RequestError, match='language: "de" is not allowed; send a code of en'):
        ask_about(handler, SHORT, language="de")
    with pytest.raises(RequestError, match="the model knows English alone"):
        ask_about(handler, SHORT, task="translate")
    assert ask_about(handler, SHORT, details=True, num_beams=1)["language"] == "english"


def test_words_need_the_heads_that_align(tmp_path: Path) -> None:
    handler = started(whisper_model(tmp_path / "model", alignment_heads=None))
    with pytest.raises(RequestError, match="word needs alignment_heads"):
        ask_about(handler, SHORT, return_timestamps="word")


def test_a_model_of_one_pass_reads_long_sounds_in_chunks(tmp_path: Path) -> None:
    directory = make_task_model(TASK, tmp_path / "ctc")
    handler: Any = started(directory)
    library = transformers.pipeline(TASK, model=str(directory), device="cpu")
    assert ask_about(handler, SHORT) == library(SHORT)
    assert ask_about(handler, LONG) == library(LONG, chunk_length_s=30)
    expected = json.loads(json.dumps(library(LONG, chunk_length_s=30, return_timestamps="word")))
    assert ask_about(handler, LONG, return_timestamps="word", details=True) == {**expected, "duration": 62.0}
    for name, value in {"language": "en", "prompt": "a", "temperature": 0, "task": "translate"}.items():
        with pytest.raises(RequestError, match=f"parameters.{name} is for models of Whisper"):
            ask_about(handler, SHORT, **{name: value})
    with pytest.raises(RequestError, match="only Whisper has times of segments"):
        ask_about(handler, SHORT, return_timestamps=True)


# --- concurrent requests ---


async def answer_of(service: SpeechService, samples: np.ndarray, **parameters: Any) -> Any:
    response = await service.handle(with_parameters(samples, parameters))
    (result,) = json.loads(response.data)
    return result


class Steps:
    """Counts the steps of a task, each with its sounds; `advance` takes the place of the task's own."""

    def __init__(self, task: Any) -> None:
        self.seen: list[Any] = []
        self._advance = task.advance
        self._news = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def advance(self, together: Any) -> None:
        self.seen.extend(together)
        self._loop.call_soon_threadsafe(self._news.set)
        self._advance(together)

    async def wait_for(self, count: int) -> None:
        while len(self.seen) < count:
            await self._news.wait()
            self._news.clear()


@on_loop
async def test_a_short_sound_does_not_wait_for_a_long_one(
    handler: PipelineHandler, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []
    sounds = {"short": SHORT, "long": speech(200)}
    expected = {name: ask_about(handler, samples, num_beams=1) for name, samples in sounds.items()}

    async def one(service: SpeechService, name: str, **more: Any) -> Any:
        result = await answer_of(service, sounds[name], num_beams=1, **more)
        ended.append(name)
        return result

    service, steps = service_of(handler), Steps(handler.task)
    monkeypatch.setattr(handler.task, "advance", steps.advance)
    begun = asyncio.create_task(one(service, "long"))
    await steps.wait_for(2)
    long, *short = await asyncio.gather(begun, *(one(service, "short", return_duration=True) for _ in range(3)))
    await service.stop()
    assert ended == ["short"] * 3 + ["long"]
    assert long == expected["long"]
    assert short == [{**expected["short"], "duration": 5.0}] * 3


@on_loop
async def test_only_the_failing_sound_of_a_step_fails(
    handler: PipelineHandler, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, task = service_of(handler), handler.task
    broken = speech(31, seed=9)
    assert isinstance(task, Whisper)
    advance = task.advance

    def failing(together: Any) -> None:
        if any(one.duration == 31 and one.samples is None for one in together):
            raise RuntimeError("the sound is broken")
        advance(together)

    monkeypatch.setattr(task, "advance", failing)

    sounds = [speech(32, seed=1), broken, speech(33, seed=2)]
    calls = [answer_of(service, samples, num_beams=1) for samples in sounds]
    first, failed, last = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(failed, LmiServerError)
    assert "the sound is broken" in failed.message
    assert first["text"]
    assert last["text"]


@on_loop
async def test_a_request_that_is_cancelled_has_no_further_step(
    handler: PipelineHandler, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, steps = service_of(handler), Steps(handler.task)
    monkeypatch.setattr(handler.task, "advance", steps.advance)
    call = asyncio.create_task(answer_of(service, LONG))
    await steps.wait_for(2)  # it computes its first window
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert (await answer_of(service, SHORT, num_beams=1))["text"]
    seen = steps.seen
    assert [one.duration for one in seen].count(62.0) == 2
    assert seen[0].result is None


@on_loop
async def test_clients_that_leave_queue_no_sounds(handler: PipelineHandler, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a thread has of a client that has left takes memory until it is done; the next one waits for its turn."""
    goes_on, read = threading.Event(), handler.read

    def slow(request: Input) -> Any:
        goes_on.wait(60)
        return read(request)

    service = service_of(handler)
    monkeypatch.setattr(handler, "read", slow)
    calls = [asyncio.create_task(answer_of(service, SHORT)) for _ in range(20)]
    await asyncio.sleep(0.05)
    for call in calls:
        call.cancel()
    await asyncio.sleep(0.05)
    assert [call.done() for call in calls].count(True) == 16
    assert service._reading._work_queue.qsize() == 0
    goes_on.set()
    await asyncio.gather(*calls, return_exceptions=True)
    assert (await answer_of(service, SHORT))["text"]


@on_loop
async def test_waiting_requests_show_progress(handler: PipelineHandler) -> None:
    service = service_of(handler)
    moved: list[int] = []
    service.note_progress = lambda request: moved.append(id(request))  # type: ignore[method-assign]

    requests = [with_parameters(samples, {"num_beams": 1}) for samples in (LONG, SHORT)]
    await asyncio.gather(*map(service.handle, requests))
    assert all(moved.count(id(one)) > 2 for one in requests)


@on_loop
async def test_many_sounds_of_one_request_let_others_have_their_turn(
    handler: PipelineHandler, monkeypatch: pytest.MonkeyPatch
) -> None:
    import base64

    sound = base64.b64encode(sound_file(speech(1))).decode()
    body = {"inputs": [sound] * 40, "parameters": {"num_beams": 1}}

    service, steps = service_of(handler), Steps(handler.task)
    monkeypatch.setattr(handler.task, "advance", steps.advance)
    many = asyncio.create_task(service.handle(request(body)))
    await steps.wait_for(1)
    assert (await answer_of(service, SHORT, num_beams=1))["text"]
    assert len({id(one) for one in steps.seen if one.duration == 1}) <= 16
    assert len(json.loads((await many).data)) == 40


@on_loop
async def test_a_sound_that_is_done_does_not_fail_with_another(
    handler: PipelineHandler, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, task = service_of(handler), handler.task
    assert isinstance(task, Whisper)
    finish = task._result

    def failing(one: Any) -> Any:
        if one.duration == 4:
            raise RuntimeError("it has no result")
        return finish(one)

    monkeypatch.setattr(task, "_result", failing)

    calls = [answer_of(service, speech(seconds), num_beams=1) for seconds in (5, 4)]
    done, failed = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(failed, LmiServerError)
    assert not isinstance(done, BaseException), done
    assert done["text"]


# --- streams ---


async def pieces_of(service: SpeechService, samples: np.ndarray, **parameters: Any) -> list[str]:
    response = await service.handle(with_parameters(samples, parameters, accept="text/event-stream"))
    assert isinstance(response.stream, AsyncIterator)
    frames = [frame async for frame in response.stream if frame]
    return [json.loads(frame.removeprefix(b"data: "))["outputs"][0] for frame in frames]


@pytest.mark.parametrize("sound", SOUNDS)
@pytest.mark.parametrize("beams", [1, 2])
def test_a_stream_is_the_text_in_pieces(handler: PipelineHandler, sound: str, beams: int) -> None:
    expected = ask_about(handler, SOUNDS[sound], num_beams=beams)["text"]
    pieces = asyncio.run(pieces_of(service_of(handler), SOUNDS[sound], num_beams=beams))
    assert "".join(pieces) == expected
    assert len(pieces) > 1 or (sound, beams) == ("short", 2)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("seconds", [3, 40])
def test_streams_of_any_bytes_are_the_text(bytes_model: Any, seed: int, seconds: int) -> None:
    samples = speech(seconds, seed=100 + seed)
    expected = ask_about(bytes_model, samples, num_beams=1)["text"]
    assert "".join(asyncio.run(pieces_of(service_of(bytes_model), samples, num_beams=1))) == expected


@pytest.fixture(scope="module")
def bytes_model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model that writes any bytes, most of which are no characters."""
    return started(whisper_model(tmp_path_factory.mktemp("bytes") / "model", suppress_tokens=None))


def test_a_stream_without_a_worker_s_loop_is_the_same(handler: PipelineHandler) -> None:
    expected = ask_about(handler, SHORT, num_beams=1)["text"]
    (outcome,) = handler.handle([with_parameters(SHORT, {"num_beams": 1}, accept="text/event-stream")])
    assert not isinstance(outcome, LmiServerError)
    assert isinstance(outcome.stream, Iterator)
    frames = [json.loads(frame.removeprefix(b"data: "))["outputs"][0] for frame in outcome.stream]
    assert "".join(frames) == expected


def test_a_stream_is_of_one_sound(handler: PipelineHandler) -> None:
    body = {"inputs": ["a", "b"]}
    with pytest.raises(RequestError, match=r"inputs: .* is not base64|send one input"):
        ask(handler, body, accept="text/event-stream")


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([], 0),
        ([1, 2], 2),
        ([10, 1, 12], 3),
        ([10, 1, 12, 12], 3),
        ([10, 1, 12, 12, 2], 3),
        ([10, 1, 12, 12, 2, 14], 3),
        ([10, 1, 12, 12, 2, 14, 14], 6),
    ],
)
def test_certain_tokens(tokens: list[int], expected: int) -> None:
    assert certain_tokens(tokens, 10) == expected


def test_a_request_may_have_several_sounds(handler: PipelineHandler) -> None:
    import base64

    sounds = [base64.b64encode(sound_file(samples)).decode() for samples in (SHORT, speech(2, seed=8))]
    body = {"inputs": sounds, "parameters": {"num_beams": 1}}
    response = asyncio.run(service_of(handler).handle(request(body)))
    assert approximately(json.loads(response.data), ask(handler, body))
