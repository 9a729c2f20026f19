"""The fake of TensorRT-LLM has the names and the defaults that NVIDIA lists for version 1.x, and refuses as it does."""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from paths import DATA
from relay_helpers import on_loop
from tensorrt_llm_helpers import fake_installed, make_model

LISTED = json.loads((DATA / "tensorrt_llm_signatures.json").read_text())
NOT_LISTED = "unlisted"  # the list has no default for the name
MODELS = (
    *("BaseLlmArgs", "TrtLlmArgs", "TorchLlmArgs", "KvCacheConfig", "SchedulerConfig", "CudaGraphConfig"),
    *("CalibConfig", "ExtendedRuntimePerfKnobConfig", "QuantConfig", "BuildConfig"),
)


@pytest.fixture(scope="module", autouse=True)
def fake() -> Iterator[None]:
    with fake_installed():
        yield


def differences(listed: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Return the names that are missing or have another default."""
    return [
        f"{name}: listed {default!r}, here {here.get(name, 'missing')!r}"
        for name, default in listed.items()
        if name not in here or default not in (NOT_LISTED, here[name])
    ]


def parameters(function: Any) -> dict[str, Any]:
    found = inspect.signature(function).parameters.values()
    return {each.name: each.default for each in found if each.name != "self" and each.kind is not each.VAR_KEYWORD}


@pytest.mark.parametrize("name", ["LLM.__init__", "LLM.generate_async", "LoRARequest.__init__"])
def test_functions_have_the_listed_parameters(name: str) -> None:
    import tensorrt_llm._tensorrt_engine
    from tensorrt_llm import llmapi

    class_name, function = name.split(".")
    classes = [getattr(llmapi, class_name)]
    classes += [tensorrt_llm._tensorrt_engine.LLM] if class_name == "LLM" else []
    for cls in classes:
        here = parameters(getattr(cls, function))
        assert differences(LISTED[name], here) == []
        assert here.keys() == LISTED[name].keys()


@pytest.mark.parametrize("name", MODELS)
def test_configurations_have_the_listed_fields_and_no_others(name: str) -> None:
    from pydantic import ValidationError
    from tensorrt_llm.llmapi import llm_args

    cls = getattr(llm_args, name)
    here = {field: info.get_default(call_default_factory=True) for field, info in cls.model_fields.items()}
    assert differences(LISTED[name], here) == []
    with pytest.raises(ValidationError, match="no_such_field"):
        cls(no_such_field=1)


@pytest.mark.parametrize("name", ["SamplingParams", "CompletionOutput"])
def test_dataclasses_have_the_listed_fields(name: str) -> None:
    from tensorrt_llm import llmapi

    cls = getattr(llmapi, name)
    here = {
        field.name: field.default_factory() if callable(field.default_factory) else field.default
        for field in dataclasses.fields(cls)
    }
    lists = {"logprobs", "prompt_logprobs"} if name == "CompletionOutput" else set()  # an empty list, not None
    listed = {key: value for key, value in LISTED[name].items() if key not in lists}
    assert differences(listed, here) == []
    with pytest.raises(TypeError):
        cls(max_new_tokens=1)


@on_loop
async def test_a_result_has_the_listed_attributes_and_is_one_growing_object(tmp_path: Path) -> None:
    from tensorrt_llm import LLM, SamplingParams

    llm = LLM(str(make_model(tmp_path / "model")))
    result = llm.generate_async("abc", SamplingParams(max_tokens=3), streaming=True)
    seen = [(id(step), step.outputs[0].text) async for step in result]
    llm.shutdown()
    with pytest.raises(RuntimeError, match="shutting down"):
        llm.generate_async("abc")
    numbers, texts = [number for number, _ in seen], [text for _, text in seen]
    assert len(set(numbers)) == 1
    assert texts == ["a", "ab", "abc"]
    assert [name for name in LISTED["RequestOutput"] if not hasattr(result, name)] == []
    assert result.outputs[0].finish_reason == "length"


def test_an_llm_refuses_unknown_arguments(tmp_path: Path) -> None:
    import tensorrt_llm._tensorrt_engine
    from tensorrt_llm import LLM, llmapi

    with pytest.raises(ValueError, match="LLM got invalid argument: max_length"):
        LLM(str(tmp_path), max_length=1)
    with pytest.raises(ValueError, match="specific to TensorRT backend"):
        LLM(str(tmp_path), fast_build=True)
    with pytest.raises(ValueError, match="LLM got invalid argument: attn_backend"):
        tensorrt_llm._tensorrt_engine.LLM(str(tmp_path), attn_backend="TRTLLM")
    with pytest.raises(ValueError, match="lora_path"):
        llmapi.LoRARequest("a", 1, str(tmp_path / "none"))
