"""The neuronx handler over a fake of optimum-neuron, whose parameters are those of the real one."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from neuronx_helpers import (
    FAKE_OPTIMUM_NEURON,
    HeldGraphs,
    deltas,
    ids,
    importable,
    options_of,
    pass_of_the_next,
    started,
)
from paths import DATA
from rolling_batch_helpers import generated
from tiny_models import byte_tokenizer, saved_model, tiny_model

from lmi_server.contract.errors import ModelLoadError, ModelMemoryError, RequestError

BATCHED = {"model_loader": "optimum", "rolling_batch": "auto", "max_rolling_batch_size": 3, "dtype": "bf16"}
PROMPTS = [[7], [1, 2], list(range(30)), list(range(9))]


@pytest.fixture(scope="module", autouse=True)
def fake() -> Iterator[None]:
    with importable(FAKE_OPTIMUM_NEURON, "optimum"):
        yield


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model(tiny_model("qwen2"), tmp_path_factory.mktemp("optimum") / "qwen2")


async def answers(directory: Path, **given: Any) -> list[list[int]]:
    async with started(directory, **given) as handler:
        return [ids(answer) for answer in await asyncio.gather(*(deltas(handler, prompt, 8) for prompt in PROMPTS))]


def called() -> dict[str, Any]:
    from optimum.neuron import calls

    found = dict(calls)
    calls.clear()
    return found


def test_the_fake_has_the_parameters_of_the_real_one() -> None:
    """A call with a parameter that the real one lacks fails in the tests below."""
    from optimum.neuron import NeuronModelForCausalLM, NxDNeuronConfig

    recorded = json.loads((DATA / "optimum_neuron_signatures.json").read_text())
    further = set(recorded["NxDPreTrainedModel._export"])  # export passes keywords on to it
    for name in ("from_pretrained", "get_neuron_config", "export", "save_pretrained"):
        parameters = set(inspect.signature(getattr(NeuronModelForCausalLM, name)).parameters) - {"self"}
        assert parameters <= {*recorded[f"NeuronModelForCausalLM.{name}"], *(further if name == "export" else ())}
    assert (
        list(inspect.signature(NeuronModelForCausalLM.forward).parameters)[1:]
        == recorded["NxDModelForCausalLM.forward"]
    )
    assert set(inspect.signature(NxDNeuronConfig).parameters) <= set(recorded["NxDNeuronConfig"])
    assert set(options_of(**BATCHED, fuse_qkv=True).engine_arguments()) <= set(recorded["NxDNeuronConfig"])


def test_it_generates_what_transformers_does(directory: Path) -> None:
    expected = [generated(tiny_model("qwen2"), prompt, 8) for prompt in PROMPTS]
    assert (
        asyncio.run(answers(directory, **BATCHED, tensor_parallel_degree="2", context_length_estimate="16")) == expected
    )
    arguments = called()["export"]
    shown = dict(options_of(**BATCHED, tensor_parallel_degree="2", context_length_estimate="16").engine_arguments())
    assert str(arguments["torch_dtype"]) == f"torch.{shown.pop('torch_dtype')}"
    assert shown == {
        "batch_size": 3,
        "continuous_batching": True,
        "sequence_length": 64,
        "max_context_length": 16,
        "tp_degree": 2,
        "on_device_sampling": False,
    }
    assert shown.items() <= arguments.items()


def test_a_client_that_leaves_frees_its_place_within_one_step(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The third of three requests begins in the step after the one that the first left; bad ones harm no other."""

    async def run() -> int:
        async with started(directory, **{**BATCHED, "max_rolling_batch_size": 2}) as handler:
            with pytest.raises(RequestError, match="64"):
                await deltas(handler, [1] * 60, 10)
            with pytest.raises(RequestError, match="vocabulary"):
                await deltas(handler, [999], 2)
            from optimum.neuron import NeuronModelForCausalLM

            graphs = HeldGraphs(NeuronModelForCausalLM, monkeypatch)
            return await pass_of_the_next(handler, graphs, [[1, 2], [3, 4], [201, 202, 203]])

    assert asyncio.run(run()) == 4  # behind the first prompt and a token of it, the second prompt and a token of it


def test_a_compiled_model_is_loaded_as_it_was_compiled(directory: Path, tmp_path: Path) -> None:
    """The package is chosen by the files; other shapes, and graphs that return tokens, are refused by name."""
    target = tmp_path / "compiled"
    batched = {key: value for key, value in BATCHED.items() if key != "model_loader"}
    asyncio.run(answers(directory, **BATCHED, save_mp_checkpoint_path=str(target)))
    byte_tokenizer().save_pretrained(target)
    assert "save_pretrained" in called()
    assert asyncio.run(answers(target, **batched)) == [generated(tiny_model("qwen2"), prompt, 8) for prompt in PROMPTS]
    assert called() == {"from_pretrained": {"model_id": str(target)}}
    with pytest.raises(ModelLoadError, match=r"set option\.max_rolling_batch_size=3 in place of 1"):
        asyncio.run(answers(target))
    stored = json.loads((target / "neuron_config.json").read_text())
    (target / "neuron_config.json").write_text(json.dumps({**stored, "on_device_sampling": True}))
    with pytest.raises(ModelLoadError, match="compiled to sample on the device"):
        asyncio.run(answers(target, **batched))


@pytest.mark.parametrize(
    ("fails", "error", "text"),
    [
        ("device", ModelLoadError, "no Neuron device can be used here: neuron-ls"),
        ("compile", ModelLoadError, "optimum-neuron cannot load .*the compiler's log says more"),
        ("memory", ModelMemoryError, "raise option.tensor_parallel_degree"),
        ("core", ModelLoadError, "optimum-neuron cannot compute with .*nrt_execute status=1202"),
    ],
)
def test_a_failed_load_names_the_cause_and_the_remedy(
    directory: Path, monkeypatch: pytest.MonkeyPatch, fails: str, error: type[Exception], text: str
) -> None:
    monkeypatch.setenv("FAKE_NEURONX_FAILS", fails)
    with pytest.raises(error, match=text):
        asyncio.run(answers(directory, **BATCHED))
