"""`lmi-server schema`: it takes what check takes, and refuses wrong values."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from paths import ROOT, SAMPLES
from typer.testing import CliRunner

from lmi_server.commands.cli import app
from lmi_server.configuration.declaration import Option
from lmi_server.configuration.handlers import HANDLERS, load_options_type
from lmi_server.configuration.layers import Source, build
from lmi_server.configuration.options import ServingOptions
from lmi_server.configuration.properties import parse_properties
from lmi_server.configuration.server_settings import ServerSettings
from lmi_server.schema.documents import config_properties, model_file, serving_properties

RAY_SAMPLES = [*SAMPLES.glob("ray/*.yaml")]
_KINDS = {load_options_type(spec) for spec in HANDLERS.specs} | {ServingOptions, ServerSettings}
DECLARING = sorted(_KINDS, key=lambda declaring: declaring.__name__)


@functools.cache
def schema(document: Callable[[], dict[str, Any]]) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(document())


def flat(text: str) -> dict[str, str]:
    return {key: entry.value.strip() for key, entry in parse_properties(text, "file").entries.items()}


@pytest.mark.parametrize(
    "kind", [serving_properties, config_properties, model_file], ids=["serving", "config", "model-file"]
)
def test_a_schema_is_one(kind: Callable[[], dict[str, Any]]) -> None:
    jsonschema.Draft202012Validator.check_schema(schema(kind).schema)


@pytest.mark.parametrize("sample", sorted(SAMPLES.glob("*.properties")), ids=lambda sample: sample.stem)
def test_every_sample_is_valid(sample: Any) -> None:
    schema(serving_properties).validate(flat(sample.read_text(encoding="utf-8")))


@pytest.mark.parametrize("sample", sorted([*RAY_SAMPLES, *(ROOT / "deploy").rglob("*model*.yaml")]), ids=str)
def test_every_model_file_is_valid(sample: Any) -> None:
    content = yaml.safe_load(sample.read_text(encoding="utf-8"))
    if not isinstance(content, dict) or content.keys().isdisjoint(("engine_config", "model_loading_config")):
        pytest.skip("no model file")
    schema(model_file).validate(content)


@pytest.mark.parametrize(
    "line",
    [
        "engine=Pyton",
        "job_queue_size=0",
        "minWorkers=two",
        "batch_size=-1",
        "load_on_devices=gpu0,gpu1",
        "option.dtype=fp12",
        "option.enable_lora=maybe",
        "option.tensor_parallel_degree=most",
        "option.mem_fraction_static=high",
        "option.rolling_batch=vlm",
        "option.sessions_s3url=bucket",
    ],
)
def test_a_wrong_value_is_refused(line: str) -> None:
    assert not schema(serving_properties).is_valid(flat(line))
    assert schema(serving_properties).is_valid(flat(line.partition("=")[0] + "="))  # which leaves the key unset


@pytest.mark.parametrize(
    ("values", "valid"),
    [
        ({"port": "8080", "log_level": "INFO", "batch_size": "4", "job_queue_size": 10}, True),
        ({"inference_address": "https://0.0.0.0:8443", "grpc_port": "7070"}, True),
        ({"port": "eighty"}, False),
        ({"port": 70000}, False),
        ({"log_format": "xml"}, False),
        ({"bad_request_http_code": 200}, False),
    ],
)
def test_settings_of_the_server(values: dict[str, Any], valid: bool) -> None:
    assert schema(config_properties).is_valid(values) == valid


ENGINE = {"model_id": "m"}


@pytest.mark.parametrize(
    ("content", "valid"),
    [
        ({"engine_config": ENGINE}, True),
        ({"engine_config": {**ENGINE, "hf_model_id": None}}, True),
        ({"engine_config": ENGINE, "deployment_config": {"max_concurrent_queries": 8}}, True),
        ({"engine_config": ENGINE, "deployment_config": {"max_ongoing_requests": 0}}, False),
        ({"engine_config": {**ENGINE, "typ": "VLLMEngine"}}, False),
        ({"engine_config": {**ENGINE, "type": "VLLM"}}, False),
        ({"model_loading_config": ENGINE, "llm_engine": "vLLM"}, True),
        ({"model_loading_config": {}}, False),
        ({"llm_configs": [{"model_loading_config": ENGINE}, "other.yaml"]}, True),
        ({"llm_configs": [{"model_loading_config": {**ENGINE, "sauce": "x"}}]}, False),
        ({"workflow": {}}, False),
    ],
)
def test_model_files(content: dict[str, Any], valid: bool) -> None:
    assert schema(model_file).is_valid(content) == valid


def test_a_strict_schema_refuses_unknown_keys() -> None:
    strict = jsonschema.Draft202012Validator(serving_properties(strict=True))
    assert schema(serving_properties).is_valid({"option.own_key": "1"})
    assert not strict.is_valid({"option.dtpye": "fp16"})
    assert strict.is_valid({"option.dtype": "FP16", "option.s3url": "s3://bucket/model"})


def test_every_declared_key_is_in_the_schema_with_its_words() -> None:
    properties = serving_properties()["properties"]
    for declaring in DECLARING:
        if declaring is ServerSettings:
            continue
        for option in declaring.declared_options():
            for key in option.keys:
                assert properties[key]["description"]
    assert properties["option.data_type"]["description"].startswith("The same as option.dtype.")
    assert properties["option.enable_streaming"]["deprecated"] is True
    assert "huggingface" in properties["option.schedule_policy"]["x-handlers"]


def candidates(option: Option) -> Iterator[str]:
    """Yield texts that may be values: near what the declaration names."""
    words = [*map(str, option.choices), *re.findall(r"[\w.+*-]+", option.allowed), str(option.default)]
    for word in words:
        yield from (word, word.upper(), word.capitalize(), f" {word} ")
    yield from ("0", "1", "-1", "+3", "-0", "00", "1_000", "8.0", "0.5", ".5", "1e-3", "inf", "nan", "max", "None", "")
    yield from ("a,b", "[]", '["a"]', "{}", "A=1", "s3://bucket/x", "*", "gpu0;gpu1", "600", "unix:/x", "10/PT5M")


def is_right(option: Option, text: str) -> bool:
    _, wrong = build(option.declared_by, {option.key: Source("serving.properties", text)})
    return not wrong


@pytest.mark.parametrize("declaring", DECLARING, ids=lambda declaring: declaring.__name__)
def test_the_schema_takes_whatever_check_takes(declaring: Any) -> None:
    validator = schema(config_properties if declaring is ServerSettings else serving_properties)
    refused = [
        (option.key, text)
        for option in declaring.declared_options()
        for text in candidates(option)
        if is_right(option, text) and not validator.is_valid({option.key: text})
    ]
    assert refused == []


@given(st.text(alphabet="0123456789+-._eE ", max_size=8))
@example("1E_-1")
@example("-0e5")
@example("0-0")
def test_numbers_that_check_takes_are_valid(text: str) -> None:
    known = {option.key: option for declaring in DECLARING for option in declaring.declared_options()}
    for key in ("minWorkers", "option.mem_fraction_static", "option.max_model_len", "quarantine_time"):
        if is_right(known[key], text.strip()):
            assert schema(serving_properties).is_valid({key: text.strip()}), key


@pytest.mark.parametrize("name", ["serving.properties", "model-file", "config.properties"])
def test_the_command_prints_it(name: str) -> None:
    done = CliRunner().invoke(app, ["schema", name])
    assert done.exit_code == 0
    assert json.loads(done.output)["$schema"].startswith("https://json-schema.org/")
