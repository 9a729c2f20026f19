"""Every key of LMI's section on Transformers-NeuronX, from serving.properties to what a library gets of it.

`explain` shows the arguments, and the fakes of transformers-neuronx and optimum-neuron record them.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from model_directories import write_properties
from neuronx_helpers import FAKE_OPTIMUM_NEURON, FAKE_TRANSFORMERS_NEURONX, importable
from paths import DATA
from tiny_models import byte_tokenizer, saved_model, tiny_model

from handlers.neuronx.handler import NeuronxHandler
from lmi_server.configuration.resolve import Inspection, inspect_model
from lmi_server.explain.explanation import explain
from lmi_server.machine.inventory import Gpu, Machine

MACHINE = Machine(
    2**38,
    2**37,
    engines=frozenset({"transformers_neuronx", "optimum.neuron", "vllm", "vllm_neuron"}),
    neuron_devices=2,
    neuron_cores=tuple(Gpu(str(core), 2**34) for core in range(4)),
)
BATCHED = {"rolling_batch": "auto", "max_rolling_batch_size": "3", "n_positions": "64"}
CONFIG = "neuron_config"  # the nested argument
# Options, and what transformers-neuronx gets, nested arguments by their names joined with dots.
CASES: list[tuple[dict[str, str], dict[str, Any]]] = [
    (
        {
            **BATCHED,
            "dtype": "bf16",
            "tensor_parallel_degree": "4",
            "unroll": "2",
            "low_cpu_mem_usage": "true",
            "context_length_estimate": "64,32",
            "group_query_attention": "replicated-heads",
            "fuse_qkv": "true",
            "on_device_embedding": "true",
            "collectives_layout": "BSH",
            "attention_layout": "BSH",
            "cache_layout": "SBH",
            "all_reduce_dtype": "float32",
            "cast_logits_dtype": "float16",
            "sequence_parallel": "true",
            "sequence_parallel_norm_threshold": "32",
            "shard_over_sequence": "true",
            "compilation_worker_count": "2",
            "fuse_mlp": "true",
            "fused_rmsnorm_qkv": "true",
            "qkv_tiling": "true",
            "weight_tiling": "true",
            "mlp_out_weight_transpose": "true",
            "revision": "main",
            "trust_remote_code": "true",
        },
        {
            "amp": "bf16",
            "tp_degree": 4,
            "batch_size": 3,
            "unroll": 2,
            "low_cpu_mem_usage": True,
            "context_length_estimate": [32, 64],
            "revision": "main",
            "trust_remote_code": True,
            f"{CONFIG}.group_query_attention": "replicated-heads",
            f"{CONFIG}.fuse_qkv": True,
            f"{CONFIG}.on_device_embedding": True,
            f"{CONFIG}.collectives_layout": "BSH",
            f"{CONFIG}.attention_layout": "BSH",
            f"{CONFIG}.cache_layout": "SBH",
            f"{CONFIG}.all_reduce_dtype": "float32",
            f"{CONFIG}.cast_logits_dtype": "float16",
            f"{CONFIG}.sequence_parallel_norm": True,
            f"{CONFIG}.sequence_parallel_norm_threshold": 32,
            f"{CONFIG}.shard_over_sequence": True,
            f"{CONFIG}.compilation_worker_count": 2,
            f"{CONFIG}.fuse_mlp": True,
            f"{CONFIG}.fused_rmsnorm_qkv": True,
            f"{CONFIG}.qkv_tiling": True,
            f"{CONFIG}.weight_tiling": True,
            f"{CONFIG}.mlp_out_weight_transpose": True,
        },
    ),
    ({"n_positions": "48"}, {"n_positions": 48, "context_length_estimate": [48], "batch_size": 1, "amp": "f16"}),
    ({"load_in_8bit": "true"}, {f"{CONFIG}.quant.quant_dtype": "s8", f"{CONFIG}.quant.dequant_dtype": "f16"}),
    ({"quantize": "static_int8", "amp": "f32"}, {f"{CONFIG}.quant.quant_dtype": "s8", "amp": "f32"}),
    ({"group_query_attention": "shard-over-heads"}, {f"{CONFIG}.group_query_attention": "shard-over-heads"}),
    ({"sequence_parallel_norm_threshold": "16"}, {f"{CONFIG}.sequence_parallel_norm": True}),
    ({"model_loader": "tnx", "tensor_parallel_degree": "max"}, {"tp_degree": 4}),
    ({**BATCHED, "cache_layout": "BSH"}, {f"{CONFIG}.cache_layout": "BSH", "context_length_estimate": [64]}),
]
# What transformers-neuronx and its compiler read from variables.
FLAGS = {
    "neuron_optimize_level": ("3", "-O3"),
    "enable_mixed_precision_accumulation": ("true", "--enable-mixed-precision-accumulation"),
    "enable_saturate_infinity": ("true", "--enable-saturate-infinity"),
    "neuron_cc_pipeline_factor": ("4", "--tensorizer-options='--cc-pipeline-tiling-factor=4'"),
}
# What is refused or warned about by name, and the reason.
REFUSED = {
    "task": ("text-classification", "use text-generation"),
    "draft_model_compiled_path": ("/d", "option.rolling_batch=vllm, which takes option.speculative_draft_model"),
    "speculative_draft_model": ("a/b", "option.rolling_batch=vllm, which takes option.speculative_draft_model"),
    "speculative_length": ("4", "only option.rolling_batch=vllm takes a draft model"),
    "draft_model_tp_size": ("2", "only option.rolling_batch=vllm takes a draft model"),
    "on_device_generation": ("/f", "the scheduler samples on the host"),
    "multi_node": ("true", "use one machine"),
    "neuron_quant": ("true", "use option.quantize=static_int8"),
}
# Tests of the ahead-of-time compilation, of the strategies of batching and of images have these.
ELSEWHERE = {
    *("save_mp_checkpoint_path", "partition_schema", "rolling_batch_strategy"),
    *("use_stable_diffusion", "height", "width", "num_images_per_prompt", "use_auth_token"),
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model(tiny_model("llama"), tmp_path_factory.mktemp("neuronx-keys") / "llama")


def inspected(directory: Path, **options: str) -> Inspection:
    write_properties(directory, entryPoint="djl_python.transformers_neuronx", **options)
    return inspect_model(directory, {}, machine=MACHINE)


def started(found: Inspection) -> None:
    """Load the model as its worker would, and stop."""
    model = found.resolved()

    async def once() -> None:
        handler = NeuronxHandler()
        await handler.start(model.model_dir, model.options)  # type: ignore[arg-type]
        await handler.stop()

    asyncio.run(once())


def recorded(found: Inspection) -> dict[str, Any]:
    from transformers_neuronx import calls

    calls.clear()
    started(found)
    return dict(calls)


def at(values: Any, path: str) -> Any:
    """Return the value of a nested argument, which is a mapping or has it as an attribute."""
    for name in path.split("."):
        values = values[name] if isinstance(values, Mapping) else vars(values)[name]
    return values


@pytest.fixture
def fake() -> Iterator[None]:
    with importable(FAKE_TRANSFORMERS_NEURONX, "transformers_neuronx"):
        yield


@pytest.mark.usefixtures("fake")
def test_the_keys_reach_their_arguments(llama: Path, tmp_path: Path) -> None:
    wrong = []
    for number, (options, expected) in enumerate(CASES):
        found = inspected(tmp_path / str(number), model_id=str(llama), **{"n_positions": "64", **options})
        assert (found.problems, found.unavailable, found.warnings) == ((), (), ()), options
        explained, got = explain(found).engine_arguments, recorded(found)["from_pretrained"]
        for path, value in expected.items():
            if (at(explained, path), at(got, path)) != (value, value):
                wrong.append(f"{path}: {at(got, path)!r}, explained {at(explained, path)!r}, not {value!r}")
        if "rolling_batch" in options:  # a line of the KV cache for each sequence, and one graph of full length
            assert at(got, f"{CONFIG}.continuous_batching").batch_size_for_shared_caches == 3
            assert got["n_positions"] == [64]
    assert wrong == []


@pytest.mark.usefixtures("fake")
def test_the_flags_reach_the_compiler(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are added to those that the server was started with."""
    given = {key: raw for key, (raw, _) in FLAGS.items()}
    found = inspected(tmp_path / "model", model_id=str(llama), n_positions="64", **given)
    flags = " ".join(flag for _, flag in FLAGS.values())
    assert explain(found).worker_environment["NEURON_CC_FLAGS"] == flags
    monkeypatch.setenv("NEURON_CC_FLAGS", "--verbose=35 -O3")
    recorded(found)
    assert os.environ["NEURON_CC_FLAGS"] == f"--verbose=35 {flags}"
    assert "NEURON_CC_FLAGS" not in explain(inspected(tmp_path / "plain")).worker_environment


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("place", ["s3://bucket/cache", "directory"])
def test_a_cache_of_the_compiler_is_a_variable(tmp_path: Path, place: str) -> None:
    """The compiler keeps a directory for each graph below it, by which it differs from graphs of one model."""
    cache = place if "//" in place else str(tmp_path / place)
    if cache != place:
        graph = Path(cache, "neuronxcc-2.16", "MODULE_0123")
        graph.mkdir(parents=True)
        (graph / "model.neff").touch()
    found = inspected(tmp_path / "model", model_id="owner/name", compiled_graph_path=cache)
    assert found.problems == ()
    assert explain(found).worker_environment["NEURON_COMPILE_CACHE_URL"] == cache


@pytest.mark.usefixtures("fake")
def test_graphs_and_split_weights_are_loaded(llama: Path, tmp_path: Path) -> None:
    target = tmp_path / "compiled"
    recorded(inspected(tmp_path / "origin", model_id=str(llama), n_positions="64", save_mp_checkpoint_path=str(target)))
    byte_tokenizer().save_pretrained(target / "checkpoint")
    keys = {"load_split_model": "true", "compiled_graph_path": str(target / "compiled")}
    found = inspected(tmp_path / "model", model_id=str(target / "checkpoint"), n_positions="64", **keys)
    assert (found.problems, found.warnings) == ((), ())
    assert explain(found).engine_arguments[CONFIG]["on_device_embedding"] is True
    calls = recorded(found)
    assert calls["load"] == {"directory": str(target / "compiled")}
    assert calls["from_pretrained"]["path"] == str(target / "checkpoint")
    assert calls["from_pretrained"][CONFIG].on_device_embedding is True


def test_adapters_are_refused_before_the_model_loads(tmp_path: Path) -> None:
    (problem,) = inspected(tmp_path, model_id="owner/name", enable_lora="true").problems
    assert "option.enable_lora" in problem
    assert "compiled graphs take no adapters; merge the adapter into the model instead" in problem


@pytest.mark.parametrize("key", REFUSED)
def test_what_no_library_takes_is_named_with_the_reason(key: str, tmp_path: Path) -> None:
    raw, reason = REFUSED[key]
    found = inspected(tmp_path, **{key: raw})
    lines = [*found.unavailable, *found.warnings]
    assert any(f"option.{key}" in line and reason in line for line in lines), lines


def test_every_key_is_tested_or_refused() -> None:
    documented = json.loads((DATA / "documented_keys.json").read_text())
    rows = [row for row in documented["tables"] if row["section"] == "Transformers-NeuronX"]
    keys = {row["key"].removeprefix("option.") for row in rows}
    keys.update(documented["further options"]["transformers_neuronx"])
    assert len(keys) > 40
    tested = {name for options, _ in CASES for name in options} | FLAGS.keys() | REFUSED.keys()
    assert keys - ELSEWHERE - tested == {"load_split_model", "compiled_graph_path"}  # tests above have them


def test_optimum_neuron_gets_the_keys_that_it_has_arguments_for(llama: Path, tmp_path: Path) -> None:
    options = {
        **BATCHED,
        "model_loader": "optimum",
        "dtype": "bf16",
        "tensor_parallel_degree": "2",
        "context_length_estimate": "16,32",
        "fuse_qkv": "true",
    }
    expected = {
        "batch_size": 3,
        "continuous_batching": True,
        "sequence_length": 64,
        "max_context_length": 32,
        "tp_degree": 2,
        "fused_qkv": True,
        "on_device_sampling": False,
    }
    found = inspected(tmp_path / "model", model_id=str(llama), **options)
    assert found.warnings == ()
    explained = explain(found).engine_arguments
    assert explained == {**expected, "torch_dtype": "bfloat16"}
    with importable(FAKE_OPTIMUM_NEURON, "optimum"):
        from optimum.neuron import calls

        started(found)
        arguments = dict(calls)["export"]
    assert expected.items() <= arguments.items()
    assert str(arguments["torch_dtype"]) == "torch.bfloat16"


def test_what_has_no_effect_on_optimum_neuron_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.neff").touch()
    given = {
        **{key: raw for key, (raw, _) in FLAGS.items()},
        "unroll": "2",
        "sequence_parallel": "true",
        "rolling_batch_strategy": "naive_rolling_batch",
        "compiled_graph_path": str(tmp_path),
    }
    warnings = inspected(tmp_path / "model", model_loader="optimum", **BATCHED, **given).warnings
    for key in given:
        assert any(f"option.{key}" in line and "has no effect on optimum-neuron" in line for line in warnings), key


def test_vllm_on_neuron_takes_a_draft_model(tmp_path: Path) -> None:
    batched = {"rolling_batch": "vllm", "n_positions": "512", "context_length_estimate": "128,256"}
    drafts = {"speculative_draft_model": "owner/draft", "speculative_length": "4"}
    found = inspected(tmp_path / "model", model_id="owner/name", **batched, **drafts, fuse_qkv="true")
    assert (found.spec.title, found.problems, found.warnings) == ("vllm on Neuron", (), ())
    arguments = explain(found).engine_arguments
    assert arguments["max_model_len"] == 512
    assert arguments["speculative_config"] == {"model": "owner/draft", "num_speculative_tokens": 4}
    overrides = {"context_encoding_buckets": [128, 256], "fused_qkv": True}
    assert arguments["additional_config"] == {"override_neuron_config": overrides}
    split = inspected(tmp_path / "model", **batched, **drafts, draft_model_tp_size="2")
    assert explain(split).engine_arguments["speculative_config"]["draft_tensor_parallel_size"] == 2
    both = inspected(tmp_path / "model", **batched, **drafts, speculative_config='{"method": "ngram"}')
    assert any("only without option.speculative_config" in line for line in both.problems)
