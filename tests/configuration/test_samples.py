"""Every sample of serving.properties.d resolves without a problem; those that this version can serve are run."""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from paths import SAMPLES
from pipeline_helpers import ask, started
from server_helpers import running

from lmi_server.configuration.handlers import load
from lmi_server.configuration.resolve import Inspection, inspect_model, resolve_model
from lmi_server.contract.generation import GenerationRequest, SamplingParameters
from lmi_server.machine.inventory import Gpu, Machine

FILES = sorted(SAMPLES.glob("*.properties"))
MACHINE = Machine(
    total_bytes=2**38,
    available_bytes=2**37,
    gpus=tuple(Gpu(str(index), 2**36, 2**36) for index in range(8)),
    engines=frozenset({"vllm"}),
)
HANDLER = {
    "deepspeed": "deepspeed",
    "deepspeed-smoothquant": "deepspeed",
    "deepspeed-task": "deepspeed task",
    "dynamic-batching": "huggingface pipeline",
    "echo": "echo",
    "huggingface": "huggingface",
    "huggingface-accelerate": "huggingface",
    "huggingface-bitsandbytes": "huggingface",
    "huggingface-cpu": "huggingface",
    "huggingface-lora": "huggingface",
    "huggingface-mpi": "huggingface",
    "huggingface-private": "huggingface",
    "lmi-dist": "lmi-dist",
    "lmi-dist-gptq": "lmi-dist",
    "own-formatters": "huggingface",
    "own-handler": "a handler of one's own",
    "sklearn": "sklearn",
    "static-batch": "huggingface pipeline",
    "text-embedding": "huggingface pipeline",
    "stable_diffusion": "stable_diffusion",
    "stable_diffusion-neuron": "stable_diffusion on Neuron",
    "tensorrt_llm": "tensorrt_llm",
    "tensorrt_llm-awq": "tensorrt_llm",
    "tensorrt_llm-pytorch": "tensorrt_llm",
    "tensorrt_llm-smoothquant": "tensorrt_llm",
    "optimum_neuron": "transformers_neuronx",
    "transformers_neuronx": "transformers_neuronx",
    "vllm-neuron": "vllm on Neuron",
    "xgboost": "xgboost",
    "vllm": "vllm",
    "vllm-awq": "vllm",
    "vllm-embedding": "vllm pooling",
    "vllm-lora": "vllm",
    "vllm-tools": "vllm",
}
PIPELINE = "huggingface pipeline"
VLLM_ENGINES = ("vllm", "vllm pooling", "lmi-dist")  # tests of their own run them
# Tests of their own run the first and the last of these over fakes.
NEURON = ("transformers_neuronx", "vllm on Neuron", "stable_diffusion on Neuron")
TENSORRT_LLM = "tensorrt_llm"  # test_tensorrt_llm_loading.py runs its samples on a fake
OWN = "a handler of one's own"  # test_own_code.py runs such
TREE_MODELS = ("sklearn", "xgboost")  # test_tree_models.py runs them
IMAGES = "stable_diffusion"  # test_stable_diffusion.py runs a tiny one
SERVED = (
    "huggingface",
    PIPELINE,
    "deepspeed",
    "deepspeed task",
    *TREE_MODELS,
    "echo",
    *VLLM_ENGINES,
    *NEURON,
    TENSORRT_LLM,
    IMAGES,
    OWN,
)
ELSEWHERE = {name for name, title in HANDLER.items() if title in (*TREE_MODELS, *NEURON, TENSORRT_LLM, IMAGES, OWN)}
NOT_YET = {name for name, title in HANDLER.items() if title not in SERVED}
VLLM = {name for name, title in HANDLER.items() if title in VLLM_ENGINES}  # run in processes of their own
PIPELINES = {name for name, title in HANDLER.items() if title in (PIPELINE, "deepspeed task")}


def inspect(sample: Path, directory: Path) -> Inspection:
    (directory / "serving.properties").write_text(sample.read_text(encoding="utf-8"), encoding="utf-8")
    if sample.stem == "own-handler":
        (directory / "model.py").write_text("def handle(inputs): ...")
    return inspect_model(directory, {}, machine=MACHINE)


def test_every_sample_is_tested() -> None:
    assert {sample.stem for sample in FILES} == HANDLER.keys()


@pytest.mark.parametrize("sample", FILES, ids=lambda sample: sample.stem)
def test_a_sample_is_right(sample: Path, tmp_path: Path) -> None:
    if sample.stem.startswith("vllm") and find_spec("vllm") is None:
        pytest.skip("the source of vLLM says which keys it has")
    found = inspect(sample, tmp_path)
    assert found.problems == ()
    assert found.spec.title == HANDLER[sample.stem]
    assert not [text for text in found.warnings if "unknown key" in text or "deprecated" in text]
    assert bool(found.unavailable) == (sample.stem in NOT_YET)
    assert sample.read_text(encoding="utf-8").startswith("# ")


# The family of each model that a sample names; tests serve a small model of it.
FAMILIES = {
    "EleutherAI/pythia-6.9b": "gpt_neox",
    "HuggingFaceTB/SmolLM2-135M-Instruct": "llama",
    "Qwen/Qwen2.5-0.5B-Instruct": "qwen2",
    "TheBloke/Llama-2-7B-fp16": "llama",
    "facebook/opt-6.7b": "opt",
    "meta-llama/Llama-2-7b-hf": "llama",
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that saves a small model of a family."""
    from tiny_models import llama_of_whole_blocks, saved_model, tiny_model

    @functools.cache
    def save(family: str) -> Path:
        directory = tmp_path_factory.mktemp("tiny") / family
        model = llama_of_whole_blocks() if family == "llama" else tiny_model(family)  # 4-bit layers need whole blocks
        return saved_model(model, directory)

    return save


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(HANDLER.keys() - NOT_YET - VLLM - PIPELINES - ELSEWHERE))
def test_a_sample_runs(name: str, tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """A small model of the same class takes the place of the sample's own, which would have to be downloaded."""
    sample = SAMPLES / f"{name}.properties"
    (tmp_path / "serving.properties").write_text(sample.read_text(encoding="utf-8"), encoding="utf-8")
    named = re.search(r"^option\.model_id=(.*)$", sample.read_text(encoding="utf-8"), re.MULTILINE)
    instead = {"option.max_model_len": "128"}
    if named is not None:
        instead["option.model_id"] = str(tiny(FAMILIES[named[1]]))
    model = resolve_model(tmp_path, {}, instead)
    assert asyncio.run(generate(model.handler, model.model_dir, model.options)) == 4


@pytest.mark.slow
def test_the_sample_in_8_bits_serves_the_demo_model(demo_model_dir: Path, tmp_path: Path) -> None:
    """Its layers round their inputs, so that its logits over a KV cache are not exactly its own."""
    sample = SAMPLES / "deepspeed-smoothquant.properties"
    (tmp_path / "serving.properties").write_text(sample.read_text(encoding="utf-8"), encoding="utf-8")
    model = resolve_model(tmp_path, {}, {"option.model_id": str(demo_model_dir)})
    assert asyncio.run(generate(model.handler, model.model_dir, model.options)) == 4


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(PIPELINES))
def test_a_sample_of_a_task_runs(name: str, tmp_path: Path) -> None:
    from tiny_tasks import make_task_model

    sample = SAMPLES / f"{name}.properties"
    (tmp_path / "serving.properties").write_text(sample.read_text(encoding="utf-8"), encoding="utf-8")
    task = resolve_model(tmp_path, {}).options.task
    assert task is not None
    handler = started(tmp_path, model_id=str(make_task_model(task, tmp_path / "small")))
    assert ask(handler, {"inputs": "the fox"})


_OWN_HANDLER = """
from djl_python import Output

options = {}

def handle(inputs):
    if inputs.is_empty():  # the call at load
        options.update(inputs.get_properties())
        return None
    outputs = Output()
    for index, request in enumerate(inputs.get_batches()):
        outputs.add(f"{request.get_as_string()} {options['score_limit']}", batch_index=index)
    return outputs
"""


@pytest.mark.slow
def test_the_sample_of_ones_own_handler_runs(tmp_path: Path) -> None:
    """Its code gets the sample's own option, and the requests of a batch."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "serving.properties").write_bytes((SAMPLES / "own-handler.properties").read_bytes())
    (directory / "model.py").write_text(_OWN_HANDLER)
    with running(directory, workers=1) as server:
        answers = [server.http.post("/invocations", content=text) for text in ("a", "b")]
        assert [answer.text for answer in answers] == ["a 0.5", "b 0.5"]


async def generate(handler_name: str, model_dir: str, options: Any) -> int:
    """Return how many tokens the handler generates for a request of four."""
    handler: Any = load(handler_name)
    serving = handler()
    await serving.start(model_dir, options)
    request = GenerationRequest(
        request_id="1", prompt="a b", sampling=SamplingParameters(max_new_tokens=4, ignore_eos=True)
    )
    tokens = [token async for delta in serving.generate(request) for token in delta.tokens]
    await serving.stop()
    return len(tokens)
