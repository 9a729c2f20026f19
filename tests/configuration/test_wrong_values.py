"""A wrong value of any declared key gives one line with file, line, key, value and what is allowed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lmi_server.configuration.declaration import Option
from lmi_server.configuration.handlers import HANDLERS, HandlerSpec, load_options_type
from lmi_server.configuration.options import ServingOptions
from lmi_server.configuration.resolve import inspect_model
from lmi_server.contract.errors import ConfigurationError
from lmi_server.machine.inventory import Machine

MACHINE = Machine(total_bytes=2**34, available_bytes=2**33)
WRONG = "no such value!"
# They decide which handler is meant, and are tested with it.
DECIDING = ("engine", "option.entryPoint")
_OTHERWISE = {
    HANDLERS.java.title: "engine=PyTorch",
    "huggingface pipeline": "option.task=fill-mask",
    "deepspeed task": "option.entryPoint=deepspeed",
    "vllm pooling": "option.entryPoint=vllm\noption.task=text-embedding",
    "vllm on Neuron": "option.entryPoint=neuronx\noption.rolling_batch=vllm",
}


def typed(options: tuple[Option, ...]) -> list[Option]:
    """Return the options that do not take just any text."""
    return [option for option in options if option.allowed not in ("a text", "names separated by commas")]


def problems_of(directory: Path, spec: HandlerSpec, key: str) -> tuple[str, ...]:
    """Return what the resolver reports if line 3 of serving.properties gives `key` a wrong value."""
    decide = f"option.entryPoint={spec.entry_points[0]}" if spec.entry_points else _OTHERWISE[spec.title]
    lines = [*f"{decide}\n".split("\n")[:2], f"{key}={WRONG}"]
    (directory / "serving.properties").write_text("\n".join(lines))
    return inspect_model(directory, {}, machine=MACHINE).problems


@pytest.mark.parametrize("spec", [*HANDLERS.specs, HANDLERS.java], ids=lambda spec: spec.title)
def test_wrong_values(spec: HandlerSpec, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    if spec.weights_index is not None:
        (tmp_path / spec.weights_index).write_text("{}")
    shared = ServingOptions.declared_options() if spec is HANDLERS.default else ()
    allowed = {
        key: option.allowed
        for option in typed((*shared, *load_options_type(spec).declared_options()))
        for key in (option.keys[0], option.keys[-1])
        if option.key not in DECIDING
    }
    place = tmp_path / "serving.properties"
    expected = {key: (f'{place}:3: {key} = "{WRONG}" is not allowed; allowed: {allowed[key]}',) for key in allowed}
    assert {key: problems_of(tmp_path, spec, key) for key in allowed} == expected


@pytest.mark.parametrize("layer", ["serving.properties", "registration", "environment"])
@pytest.mark.parametrize("spec", [*HANDLERS.specs, HANDLERS.java], ids=lambda spec: spec.title)
def test_a_value_with_line_ends_forges_no_line(spec: HandlerSpec, layer: str, tmp_path: Path) -> None:
    """Nor does a key, or a mark that turns the order of characters."""
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    declared = (*ServingOptions.declared_options(), *load_options_type(spec).declared_options())
    keys = [key for option in declared for key in (*option.keys, f"{option.key}\nx") if key not in DECIDING]
    values = dict.fromkeys(keys, "none\n\u2028\u202egnp")
    decide = f"option.entryPoint={spec.entry_points[0]}" if spec.entry_points else _OTHERWISE[spec.title]
    escaped = (f"{key}={value}".replace("\n", r"\n").replace("\u2028", r"\u2028") for key, value in values.items())
    text = "\n".join([decide, *(escaped if layer == "serving.properties" else ())])
    (tmp_path / "serving.properties").write_text(text, encoding="utf-8")
    environment = {f"OPTION_{key.removeprefix('option.').upper()}": value for key, value in values.items()}
    found = inspect_model(
        tmp_path,
        environment if layer == "environment" else {},
        values if layer == "registration" else {},
        machine=MACHINE,
    )
    lines = (*found.problems, *found.unavailable, *found.warnings, found.handler_reason)
    assert any(r"none\n\u2028\u202egnp" in line for line in lines)
    assert [line for line in lines if not line.isprintable()] == []


def test_weights_with_a_line_end_in_their_name_are_refused_on_one_line(tmp_path: Path) -> None:
    (tmp_path / "a\nb").mkdir()
    (tmp_path / "serving.properties").write_text(r"option.model_id=a\nb")
    (line,) = [line for line in inspect_model(tmp_path, {}, machine=MACHINE).problems if "model_id" in line]
    assert r'option.model_id = "a\nb" is not allowed; there is a line end in "a\nb"; rename it' in line


def test_a_file_in_gguf_with_a_line_end_in_its_name_is_refused_on_one_line(tmp_path: Path) -> None:
    (tmp_path / "a\nb.gguf").write_bytes(b"GGUF")
    (line,) = [line for line in inspect_model(tmp_path, {}, machine=MACHINE).problems if "line end" in line]
    assert line == rf'{tmp_path}: its file in GGUF is not allowed; there is a line end in "a\nb.gguf"; rename it'


def test_a_model_directory_whose_name_ends_a_line_is_refused(tmp_path: Path) -> None:
    directory = tmp_path / "a\n"
    directory.mkdir()
    with pytest.raises(ConfigurationError, match=r'/a\\n" has a line end in its name; rename it'):
        inspect_model(directory, {}, machine=MACHINE)


@pytest.mark.parametrize("key", DECIDING)
def test_a_wrong_handler(key: str, tmp_path: Path) -> None:
    file = tmp_path / "serving.properties"
    file.write_text(f"\n{key}={WRONG}\n")
    (tmp_path / "config.json").write_text("{}")
    (problem,) = inspect_model(tmp_path, {}, machine=MACHINE).problems
    assert problem.startswith(f'{file}:2: {key} = "{WRONG}" is not allowed; allowed: ')


@pytest.mark.parametrize(
    ("entry", "advice"),
    [
        ("option.max_rolling_batch_size=8 # at a time", "allowed: an integer of 1 or more; a comment needs a line"),
        ("option.dtype=bf16\t! fast", "; a comment needs a line of its own"),
        ("option.rolling_batch=trt-llm", "; did you mean trtllm?"),
        ("option.rolling_batch=lmi_dist", "; did you mean lmi-dist?"),
    ],
)
def test_the_message_says_what_is_near(tmp_path: Path, entry: str, advice: str) -> None:
    (tmp_path / "serving.properties").write_text(f"option.entryPoint=djl_python.huggingface\n{entry}\n")
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    assert [text for text in inspect_model(tmp_path, {}, machine=MACHINE).problems if advice in text]


def test_a_pipeline_of_diffusers_under_the_engine_deepspeed_is_named(tmp_path: Path) -> None:
    (tmp_path / "serving.properties").write_text("engine=DeepSpeed\n")
    (tmp_path / "model_index.json").write_text('{"_class_name": "StableDiffusionPipeline"}')
    found = inspect_model(tmp_path, {}, machine=MACHINE)
    assert "holds a pipeline of diffusers; set option.entryPoint=djl_python.stable_diffusion" in "".join(found.problems)
    assert "for images engine=Python" in "".join(found.warnings)
