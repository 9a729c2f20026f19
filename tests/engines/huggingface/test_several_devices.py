"""A model whose layers are on several devices, or wait in main memory and on disk, generates the same tokens."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import dispatch_model, infer_auto_device_map
from adapter_helpers import read_adapter, save_adapter, with_adapter
from pipeline_helpers import approximately, ask, started
from rolling_batch_helpers import Engine, Received, generated, prompts
from simulated_devices import SimulatedDevices
from tiny_models import FAMILIES, random_model, saved_model, tiny_model
from tiny_tasks import make_task_model
from torch.nn import ModuleList
from transformers import BertConfig, BertModel, DistilBertConfig, DistilBertModel, PreTrainedModel

from handlers.checkpoints.placement import memory_limits, refuse_divided_layers
from handlers.huggingface import model as transformers_model
from handlers.huggingface.options import HuggingFaceOptions
from handlers.rolling_batch.attention.kv_cache import LayerShape, bytes_per_token, fitting_tokens
from handlers.rolling_batch.engine_loading import LoadedEngine, load_engine
from lmi_server.contract.errors import ModelLoadError
from lmi_server.contract.generation import SamplingParameters

pytestmark = pytest.mark.slow

DEVICES = [torch.device("meta", index) for index in range(3)]


@pytest.fixture
def devices() -> Iterator[None]:
    with SimulatedDevices():
        yield


def dispatched(model: PreTrainedModel, places: dict[str, int]) -> PreTrainedModel:
    """Put the modules on simulated devices."""
    named = {module: f"meta:{place}" for module, place in places.items()}
    dispatch_model(model, named, skip_keys=model._skip_keys_device_placement)
    return model


def on_two_devices(model: PreTrainedModel) -> Engine:
    """Serve `model` with its first layers on one device and the rest on another."""
    reference = copy.deepcopy(model)
    engine = Engine(dispatched(model, halves(model)), reference=reference)
    assert {layer.device for layer in engine.runner.layers} == set(DEVICES[:2])
    return engine


def halves(model: PreTrainedModel) -> dict[str, int]:
    """Return a map with embeddings and the first layer on device 0, all else but a tied head on device 1."""
    layers, blocks = next((name, module) for name, module in model.named_modules() if isinstance(module, ModuleList))
    base, _, _ = layers.rpartition(".")
    places = {f"{layers}.{index}": min(index, 1) for index in range(len(blocks))}
    inner = {f"{base}.{name}" for name, _ in model.get_submodule(base).named_children()} - {layers}
    outer = {name for name, _ in model.named_children() if not base.startswith(name)}
    on_first = {"embed_tokens", "embed_in", "wte"} | ({"lm_head"} if model.config.tie_word_embeddings else set())
    return places | {name: int(name.rpartition(".")[2] not in on_first) for name in sorted(inner | outer)}


@pytest.mark.parametrize("family", ["llama", "mistral_with_window", "gemma2_with_soft_caps", "gpt2", "gpt_neox", "opt"])
def test_the_rolling_batch_generates_what_one_device_does(devices: None, family: str) -> None:
    engine = on_two_devices(tiny_model(family))
    assert engine.fused == {}
    answers = [(prompt, engine.add(prompt, max_new_tokens=8)[1]) for prompt in prompts(6)]
    engine.run()
    for prompt, answer in answers:
        assert answer.tokens == engine.expected(prompt, 8), answer.error


def test_keys_and_values_are_on_the_device_of_their_layer(devices: None) -> None:
    engine = on_two_devices(tiny_model("llama"))
    assert [keys.device for keys in engine.runner.cache.keys] == DEVICES[:2]
    assert [values.device for values in engine.runner.cache.values] == DEVICES[:2]


def test_log_probabilities_and_sampling_need_no_second_device(devices: None) -> None:
    engine = on_two_devices(tiny_model("llama"))
    sampled = engine.generate([1, 2, 3], max_new_tokens=4, do_sample=True, temperature=0.01, top_k=5, seed=1)
    assert sampled.tokens == engine.expected([1, 2, 3], 4), sampled.error
    scored = engine.generate([1, 2, 3], max_new_tokens=4, logprobs=2, prompt_logprobs=1)
    assert scored.tokens == sampled.tokens


def test_adapters_work_on_the_device_of_each_layer(devices: None, tmp_path: Path) -> None:
    engine = on_two_devices(tiny_model("llama"))
    directory = save_adapter(engine.reference, tmp_path / "adapter", 1)
    weights = engine.engine.load_adapter(read_adapter(str(directory)))
    adapted, plain = (engine.add([5, 6, 7], adapter=adapter, max_new_tokens=6)[1] for adapter in (weights, None))
    engine.run()
    assert plain.tokens == engine.expected([5, 6, 7], 6)
    assert adapted.tokens == generated(with_adapter(engine.reference, directory), [5, 6, 7], 6)
    assert adapted.tokens != plain.tokens


def test_weights_leave_a_fifth_of_each_gpu_free(devices: None) -> None:
    """accelerate itself would fill the first GPUs to the last byte, where keys and values need room, too."""
    config = FAMILIES["llama"]()
    config.num_hidden_layers = 6
    model = random_model(config)
    total = sum(parameter.nbytes for parameter in model.parameters())
    limits = memory_limits([total, total // 2, total], main_memory=total)
    assert limits == {0: int(total * 0.8), 1: int(total // 2 * 0.8), 2: int(total * 0.8), "cpu": total}
    reference = copy.deepcopy(model)
    places = infer_auto_device_map(model, max_memory=limits, no_split_module_classes=model._no_split_modules)
    engine = Engine(dispatched(model, places), reference=reference)
    placed = {device: sum(p.nbytes for p in model.parameters() if p.device == device) for device in DEVICES}
    assert all(size <= limits[index] for index, size in enumerate(placed.values()))
    assert engine.generate([1, 2, 3], max_new_tokens=4).tokens == engine.expected([1, 2, 3], 4)


def test_a_model_whose_layers_accelerate_may_divide_is_refused() -> None:
    with torch.device("meta"):
        divided, whole = DistilBertModel(DistilBertConfig()), BertModel(BertConfig())
    for model in (divided, whole):
        model.hf_device_map = {"embeddings": 0, "layers": 1}
    refuse_divided_layers(whole, "auto")
    refuse_divided_layers(divided, {"embeddings": 0, "layers": 1})
    with pytest.raises(
        ModelLoadError, match=r"option\.device_map=auto: DistilBertModel does not say .*device_map=cuda:0"
    ):
        refuse_divided_layers(divided, "auto")


def test_the_device_with_the_least_room_decides_how_many_tokens_fit() -> None:
    layers = [LayerShape(2, 16, 16, device) for device in (DEVICES[0], DEVICES[0], DEVICES[1])]
    per_layer = bytes_per_token(layers[:1], torch.float16)
    room = {DEVICES[0]: 100.0 * per_layer, DEVICES[1]: 70.0 * per_layer}
    assert fitting_tokens(layers, torch.float16, room) == 50  # two layers share the first device
    assert fitting_tokens(layers, torch.float16, {**room, DEVICES[1]: 20.0 * per_layer}) == 20


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model(tiny_model("llama"), tmp_path_factory.mktemp("weights"))


def load(weights: Path, **options: Any) -> LoadedEngine:
    chosen = HuggingFaceOptions(**{"dtype": "fp32", "kv_cache_memory_gb": 0.001, **options})
    return load_engine(lambda: transformers_model.load(str(weights), chosen), chosen)


MODULES = ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "model.rotary_emb", "lm_head")
MAPS = {
    "the first layer on disk": dict.fromkeys(MODULES, "cpu") | {"model.layers.0": "disk"},
    "everything on disk": {"": "disk"},
}


@pytest.mark.parametrize("places", MAPS.values(), ids=MAPS)
def test_layers_on_disk_are_read_for_each_pass(weights: Path, places: dict[str, str]) -> None:
    loaded = load(weights, device_map=json.dumps(places))
    assert loaded.details["device"] == "cpu"
    assert "disk" in loaded.details["device_map"]
    answer = Received()
    loaded.engine.add("a", [1, 2, 3], SamplingParameters(max_new_tokens=5), "", 3, answer.take)
    while loaded.engine.has_work:
        loaded.engine.step()
    assert answer.tokens == generated(tiny_model("llama"), [1, 2, 3], 5)


def test_a_map_with_a_gpu_that_a_worker_lacks_fails_the_load(weights: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"this worker has 0 CUDA devices; .* raise option.tensor_parallel_degree"):
        load(weights, device_map=json.dumps({"model": 0, "lm_head": "cuda:1"}))


def test_a_map_that_leaves_out_modules_fails_the_load(weights: Path) -> None:
    with pytest.raises(ModelLoadError, match="lm_head"):
        load(weights, device_map=json.dumps({"model": "disk"}))


def test_static_batches_and_embeddings_are_the_same_with_layers_on_disk(tmp_path: Path) -> None:
    # transformers' generate() warns if the embeddings are on disk; its pipelines run where the first module is.
    first, classifier = MAPS["the first layer on disk"], {"classifier": "cpu", "bert": "disk"}
    maps = {"text-generation": first, "text-classification": classifier}
    for task, body in (
        ("text-generation", {"inputs": ["hello", "a"], "parameters": {"max_new_tokens": 5, "details": True}}),
        ("text-embedding", {"inputs": ["the red fox", "dog"]}),
        ("question-answering", {"inputs": {"question": "who jumps?", "context": "the fox jumps over the dog"}}),
        ("text-classification", {"inputs": "the red fox"}),
    ):
        directory = make_task_model(task, tmp_path / task)
        on_disk = json.dumps(maps.get(task, {"": "disk"}))
        answers = [ask(started(directory, **options), body) for options in ({}, {"device_map": on_disk})]
        assert approximately(*answers), task
