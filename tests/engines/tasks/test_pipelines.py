"""Tasks of the pipeline handler on small models, compared with what transformers answers itself."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from pipeline_helpers import LoadTask, approximately, ask, content_of, png, request, started, tone, wav
from tiny_tasks import CONTEXT, SAMPLING_RATE, make_task_model

from handlers.checkpoints.blocks.layers import BlockLinear
from handlers.tasks.options import PipelineOptions
from handlers.tasks.transformers_pipeline import load_pipeline
from lmi_server.contract.errors import ContextLengthError, LmiServerError, ModelLoadError, RequestError

pytestmark = pytest.mark.slow


def library(task: str, directory: Path) -> Any:
    return transformers.pipeline(task, model=str(directory), device="cpu")


TEXTS = {
    "fill-mask": ["the [MASK] jumps", "a [MASK]", "who is over the red [MASK]?"],
    "text-classification": ["the fox", "a", "the dog jumps over the fox"],
    "token-classification": ["the fox jumps", "who", "the red dog is over"],
}


@pytest.mark.parametrize("task", TEXTS)
def test_a_text_is_answered_as_by_the_library(load_task: LoadTask, task: str) -> None:
    handler, directory = load_task(task)
    pipeline = library(task, directory)
    expected = [pipeline(text) for text in TEXTS[task]]
    if task == "text-classification":  # there the library wraps a single result in a list
        expected = [result[0] for result in expected]
    for text, result in zip(TEXTS[task], expected, strict=True):
        assert approximately(ask(handler, {"inputs": text}), [result])
    assert approximately(ask(handler, {"inputs": TEXTS[task]}), expected)


@pytest.mark.parametrize("task", TEXTS)
def test_requests_of_a_batch_get_what_they_get_alone(load_task: LoadTask, task: str) -> None:
    handler, _ = load_task(task)
    alone = [ask(handler, {"inputs": text}) for text in TEXTS[task]]
    together = handler.handle([request({"inputs": text}) for text in TEXTS[task]])
    assert approximately([content_of(outcome) for outcome in together], alone)


def test_requests_with_other_parameters_run_apart(load_task: LoadTask) -> None:
    handler, _ = load_task("fill-mask")
    bodies = [{"inputs": "a [MASK]", "parameters": {"top_k": count}} for count in (1, 3, 1)]
    outcomes = handler.handle([request(body) for body in bodies])
    assert [len(content_of(outcome)[0]) for outcome in outcomes] == [1, 3, 1]


def test_only_the_failing_request_of_a_batch_fails(load_task: LoadTask) -> None:
    handler, _ = load_task("fill-mask")
    bodies: list[Any] = [
        {"inputs": "a [MASK]"},
        {"inputs": "no mask"},
        {"inputs": 3},
        {"inputs": "[MASK] " + "a " * CONTEXT},
        b"{",
        {"inputs": "the [MASK]", "parameters": {"topk": 1}},
        {"inputs": "the [MASK]"},
    ]
    outcomes = handler.handle([request(body) for body in bodies])
    kinds = [type(outcome) if isinstance(outcome, LmiServerError) else None for outcome in outcomes]
    assert kinds == [None, RequestError, RequestError, ContextLengthError, RequestError, RequestError, None]
    assert "parameters.topk is not known to this task; allowed: top_k, targets" in str(outcomes[5])


@pytest.mark.parametrize(
    ("parameters", "count"), [({"top_k": 2}, 2), ({"targets": ["fox", "dog"]}, 2), ({"targets": "fox"}, 1)]
)
def test_parameters_of_fill_mask(load_task: LoadTask, parameters: dict[str, Any], count: int) -> None:
    handler, directory = load_task("fill-mask")
    expected = library("fill-mask", directory)("the [MASK]", **parameters)
    assert len(expected) == count
    assert approximately(ask(handler, {"inputs": "the [MASK]", "parameters": parameters}), [expected])


def test_parameters_of_text_classification(load_task: LoadTask) -> None:
    handler, directory = load_task("text-classification")
    expected = library("text-classification", directory)("the fox", top_k=3, function_to_apply="sigmoid")
    body = {"inputs": "the fox", "parameters": {"top_k": 3, "function_to_apply": "sigmoid"}}
    assert approximately(ask(handler, body), [expected])


def test_a_pair_of_texts_is_classified(load_task: LoadTask) -> None:
    handler, directory = load_task("text-classification")
    pair = {"text": "the fox", "text_pair": "a dog"}
    assert approximately(ask(handler, {"inputs": pair}), [library("text-classification", directory)(pair)])


def test_a_text_that_is_too_long_is_refused_or_cut(load_task: LoadTask) -> None:
    handler, _ = load_task("text-classification")
    with pytest.raises(ContextLengthError, match=f"has {CONTEXT + 38} tokens, and the model takes at most {CONTEXT};"):
        ask(handler, {"inputs": "a " * (CONTEXT + 36)})
    body = {"inputs": "a " * (CONTEXT + 36), "parameters": {"truncation": True}}
    whole = ask(handler, {"inputs": "a " * (CONTEXT - 2)})
    assert approximately(ask(handler, body), whole)


@pytest.mark.parametrize("strategy", ["none", "simple", "first", "average", "max"])
def test_entities_are_put_together(load_task: LoadTask, strategy: str) -> None:
    handler, directory = load_task("token-classification")
    texts = ["the fox jumps over", "who is the blue dog"]
    expected = [library("token-classification", directory)(text, aggregation_strategy=strategy) for text in texts]
    body = {"inputs": texts, "parameters": {"aggregation_strategy": strategy}}
    assert approximately(ask(handler, body), expected)


def test_classes_are_named_by_the_request(load_task: LoadTask) -> None:
    handler, directory = load_task("zero-shot-classification")
    labels = ["red", "blue", "over"]
    pipeline = library("zero-shot-classification", directory)
    texts = ["the fox", "the dog jumps over the fox"]
    expected = [pipeline(text, candidate_labels=labels, multi_label=True) for text in texts]
    body = {"inputs": texts, "parameters": {"candidate_labels": labels, "multi_label": True}}
    assert approximately(ask(handler, body), expected)
    with pytest.raises(RequestError, match="candidate_labels is missing"):
        ask(handler, {"inputs": "the fox"})


def test_features_are_those_of_the_text_alone(load_task: LoadTask) -> None:
    handler, directory = load_task("feature-extraction")
    texts = ["the", "the fox jumps over the dog", "a red fox"]
    expected = [library("feature-extraction", directory)(text) for text in texts]
    assert approximately(ask(handler, {"inputs": texts}), expected, 1e-4)


def test_a_table_is_asked(load_task: LoadTask) -> None:
    handler, directory = load_task("table-question-answering")
    table = {"name": ["fox", "dog"], "colour": ["red", "blue"]}
    expected = library("table-question-answering", directory)(table=table, query="who is red")
    found = ask(handler, {"inputs": {"query": "who is red", "table": table}})
    assert approximately(found, {**expected, "coordinates": [list(cell) for cell in expected["coordinates"]]})
    assert ask(handler, {"query": "who is red", "table": table}) == found
    assert ask(handler, {"inputs": [{"query": "who is red", "table": table}]}) == [found]
    with pytest.raises(RequestError, match="columns of the same length"):
        ask(handler, {"inputs": {"query": "who", "table": {"a": ["1"], "b": ["1", "2"]}}})


# --- images and sounds ---


def test_an_image_is_classified(load_task: LoadTask, tmp_path: Path) -> None:
    handler, directory = load_task("image-classification")
    file = tmp_path / "image.png"
    file.write_bytes(png())
    expected = library("image-classification", directory)(str(file))
    assert approximately(ask(handler, png(), content_type="image/png"), [expected])
    encoded = base64.b64encode(png()).decode()
    assert approximately(ask(handler, {"inputs": encoded}), [expected])
    assert approximately(ask(handler, {"inputs": [f"data:image/png;base64,{encoded}", encoded]}), [expected, expected])


def test_images_of_a_batch_run_together(load_task: LoadTask) -> None:
    handler, _ = load_task("image-classification")
    files = [png(1), png(2, (64, 16))]
    alone = [ask(handler, file, content_type="image/png") for file in files]
    together = handler.handle([request(file, content_type="image/png") for file in files])
    assert approximately([content_of(outcome) for outcome in together], alone)


@pytest.mark.parametrize(
    ("body", "headers", "message"),
    [
        (b"no image", {"content_type": "image/png"}, "is not an image of a known format"),
        (png()[:200], {"content_type": "image/png"}, "is an image that cannot be read"),
        (b"", {"content_type": "image/png"}, "the body is empty"),
        ({"inputs": "http://localhost/image.png"}, {}, "is not fetched; send the bytes"),
        ({"inputs": "/etc/hostname"}, {}, "is not base64; send the bytes"),
        ({"inputs": {"image": 1}}, {}, "an object is not allowed; send the bytes"),
    ],
)
def test_what_is_no_image_is_refused(load_task: LoadTask, body: Any, headers: dict[str, str], message: str) -> None:
    handler, _ = load_task("image-classification")
    with pytest.raises(RequestError, match=message):
        ask(handler, body, **headers)


@pytest.mark.parametrize("rate", [SAMPLING_RATE, 8000])
def test_speech_is_written_down(load_task: LoadTask, rate: int) -> None:
    handler, directory = load_task("automatic-speech-recognition")
    expected = library("automatic-speech-recognition", directory)(tone(SAMPLING_RATE))
    (found,) = ask(handler, wav(rate), content_type="audio/wav")
    assert set(found) == {"text"}
    assert found["text"]
    if rate == SAMPLING_RATE:
        assert found == expected


def test_what_is_no_sound_is_refused(load_task: LoadTask) -> None:
    handler, _ = load_task("automatic-speech-recognition")
    with pytest.raises(RequestError, match="is no sound file"):
        ask(handler, b"RIFF but not really", content_type="audio/wav")
    with pytest.raises(RequestError, match="without samples"):
        ask(handler, wav(seconds=0), content_type="audio/wav")


# --- content types ---


def test_csv_brings_and_takes_rows(load_task: LoadTask) -> None:
    handler, _ = load_task("text-classification")
    first, second = ask(handler, {"inputs": ["the fox", "a, b"]})
    csv = ask(handler, b'inputs\nthe fox\n"a, b"\n', content_type="text/csv", accept="text/csv")
    rows = [line.split(",") for line in csv.splitlines()]
    assert rows[0] == ["label", "score"]
    assert [(row[0], pytest.approx(float(row[1]))) for row in rows[1:]] == [
        (item["label"], item["score"]) for item in (first, second)
    ]


def test_plain_text_is_one_input(load_task: LoadTask) -> None:
    handler, _ = load_task("text-classification")
    assert ask(handler, b"the fox", content_type="text/plain; charset=utf-8") == ask(handler, {"inputs": ["the fox"]})


@pytest.mark.parametrize("accept", ["", "*/*", "application/json", "text/html, */*;q=0.8"])
def test_json_is_the_default_answer(load_task: LoadTask, accept: str) -> None:
    handler, _ = load_task("text-classification")
    assert ask(handler, {"inputs": "a"}, accept=accept)[0]["label"]


@pytest.mark.parametrize(
    ("body", "headers", "message"),
    [
        ({"inputs": "a"}, {"accept": "image/png"}, 'Accept: "image/png" is not supported; accept application/json'),
        (b"a,b\n1,2\n", {"content_type": "text/csv"}, 'is "a, b"; begin with a line `inputs`'),
        (b"x", {"content_type": "application/pdf"}, 'Content-Type: "application/pdf" is not supported'),
        ([1], {}, "send a JSON object"),
        ({}, {}, "inputs is missing"),
        ({"inputs": []}, {}, "a list of 0 is not allowed"),
        ({"inputs": ["a", 1]}, {}, "inputs: 1 is not allowed; send a string"),
        ({"inputs": "a", "parameters": []}, {}, "parameters: a list of 0 is not allowed; send an object"),
        ({"inputs": "a", "parameters": {"top_k": 0}}, {}, "parameters.top_k: 0 is not allowed"),
        ({"messages": [{"role": "user", "content": "a"}]}, {}, "serves text-classification, which has no chat"),
    ],
)
def test_what_cannot_be_read_is_refused(load_task: LoadTask, body: Any, headers: dict[str, str], message: str) -> None:
    handler, _ = load_task("text-classification")
    with pytest.raises(RequestError, match=message.replace("[", r"\[")):
        ask(handler, body, **headers)


@pytest.mark.parametrize("route", ["chat/completions", "completions", "embeddings"])
def test_a_route_that_the_task_is_not_for_is_refused(load_task: LoadTask, route: str) -> None:
    handler, _ = load_task("text-classification")
    with pytest.raises(RequestError, match="the model serves text-classification"):
        ask(handler, {"input": "a"}, route)


# --- loading ---


def test_the_data_type_is_the_option_s(load_task: LoadTask) -> None:
    handler, directory = load_task("text-classification", dtype="bf16")
    pipeline = transformers.pipeline("text-classification", model=str(directory), device="cpu", dtype=torch.bfloat16)
    assert approximately(ask(handler, {"inputs": "the fox"}), pipeline("the fox"))


def test_a_directory_without_weights_fails_to_load(tmp_path: Path) -> None:
    directory = make_task_model("fill-mask", tmp_path / "model")
    (directory / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"transformers cannot load .* for fill-mask"):
        started(directory)


def test_weights_of_a_pipeline_are_quantised(load_task: LoadTask, tmp_path: Path) -> None:
    _, directory = load_task("text-classification")
    options = PipelineOptions(dtype="fp32", quantize="q8_0")
    pipeline = load_pipeline("text-classification", str(directory), options)
    assert any(isinstance(module, BlockLinear) for module in pipeline.model.modules())
    scores = [each("the fox")[0]["score"] for each in (pipeline, library("text-classification", directory))]
    assert scores[0] == pytest.approx(scores[1], abs=0.02)
    saving = options.model_copy(update={"save_mp_checkpoint_path": str(tmp_path / "saved")})
    message = "saved in blocks are not read for this task; use the plain checkpoint and set option.quantize"
    with pytest.raises(ModelLoadError, match=message):
        load_pipeline("text-classification", str(directory), saving)
    shutil.copytree(directory, tmp_path / "saved")
    plain, config = PipelineOptions(dtype="fp32"), json.loads((directory / "config.json").read_text())
    saving = saving.model_copy(update={"quantize": None})
    for method, of_method in (("blocks", plain), ("gptq", saving), ("awq", saving), ("compressed-tensors", saving)):
        declared = {"quantization_config": {"quant_method": method, "bits": 4}}
        (tmp_path / "saved" / "config.json").write_text(json.dumps(config | declared))
        with pytest.raises(ModelLoadError, match=message):
            load_pipeline("text-classification", str(tmp_path / "saved"), of_method)
