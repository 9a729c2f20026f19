"""`explain` of typical LMI configurations, against what LMI's documentation says that they mean."""

from __future__ import annotations

import io
import json
import re
import sys
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lmi_server.configuration.resolve import inspect_model
from lmi_server.explain.explanation import Explanation, explain
from lmi_server.explain.report import print_explanation
from lmi_server.machine.inventory import Gpu, Machine

GIB = 2**30
NO_GPU = Machine(total_bytes=16 * GIB, available_bytes=8 * GIB)
FOUR_GPUS = Machine(
    total_bytes=256 * GIB, available_bytes=200 * GIB, gpus=tuple(Gpu(str(n), 24 * GIB, 23 * GIB) for n in range(4))
)
# Llama-2-7B: 6.74e9 parameters, 32 layers of 32 heads of 128.
LLAMA_7B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "vocab_size": 32000,
}


def explained(directory: Path, properties: str, machine: Machine, **environment: str) -> Explanation:
    (directory / "serving.properties").write_text(properties)
    (directory / "config.json").write_text(json.dumps(LLAMA_7B))
    return explain(inspect_model(directory, environment, machine=machine))


@dataclass(frozen=True)
class Expected:
    """What the documentation says about `properties`: handler, values and layers by key, engine arguments."""

    properties: str
    handler: str
    values: dict[str, tuple[Any, str]]
    given: dict[str, Any] = field(default_factory=dict)
    gpus: list[list[int]] = field(default_factory=list)
    mpirun: int | None = None
    environment: dict[str, str] = field(default_factory=dict)


FILE, ALIAS, RECOMMENDED, DEFAULT = "serving.properties", "engine alias", "recommender", "default"
CONFIGURATIONS = {
    "accelerate with the scheduler": Expected(
        "engine=Python\noption.entryPoint=djl_python.huggingface\noption.rolling_batch=scheduler\noption.dtype=fp16",
        "huggingface",
        {
            "option.rolling_batch": ("scheduler", FILE),
            "option.max_rolling_batch_size": (32, DEFAULT),
            "option.tensor_parallel_degree": (-1, DEFAULT),
            "option.decoding_strategy": ("greedy", DEFAULT),
            "job_queue_size": (1000, DEFAULT),
        },
        {"dtype": "fp16"},
        [[0], [1], [2], [3]],
    ),
    "accelerate in 8 bits, the old way": Expected(
        "engine=Python\noption.load_in_8bit=true\noption.device_map=auto\noption.tensor_parallel_degree=1",
        "huggingface",
        {"option.quantize": ("bitsandbytes8", "deprecated key"), "option.rolling_batch": ("scheduler", RECOMMENDED)},
        {"device_map": "auto"},
        [[0], [1], [2], [3]],
    ),
    "accelerate over all GPUs": Expected(
        "engine=Python\noption.tensor_parallel_degree=4\noption.device_map=sequential\noption.dtype=bf16",
        "huggingface",
        {"option.tensor_parallel_degree": (4, FILE), "option.rolling_batch": ("scheduler", RECOMMENDED)},
        {"device_map": "sequential", "dtype": "bf16"},
        [[0, 1, 2, 3]],
    ),
    "accelerate in static batches on pairs of GPUs": Expected(
        "engine=Python\noption.task=text-generation\noption.rolling_batch=disable\noption.tensor_parallel_degree=2\n"
        "load_on_devices=0;2\noption.quantize=bitsandbytes8",
        "huggingface pipeline",
        {"option.tensor_parallel_degree": (2, FILE)},
        {},
        [[0, 1], [2, 3]],
    ),
    "vllm on all GPUs": Expected(
        "engine=Python\noption.rolling_batch=vllm",
        "vllm",
        {
            "option.tensor_parallel_degree": (4, RECOMMENDED),
            "option.gpu_memory_utilization": (0.9, DEFAULT),
            "option.enforce_eager": (False, DEFAULT),
            "option.max_rolling_batch_size": (256, RECOMMENDED),
        },
        {"tensor_parallel_size": 4, "max_num_seqs": 256, "dtype": "auto", "load_format": "auto"},
        [[0, 1, 2, 3]],
    ),
    "vllm with awq and a shorter context": Expected(
        "option.rolling_batch=vllm\noption.quantize=awq\noption.max_model_len=2048\noption.tensor_parallel_degree=2\n"
        "option.max_rolling_batch_prefill_tokens=4096\noption.enforce_eager=True",
        "vllm",
        {"option.quantize": ("awq", FILE), "option.max_model_len": (2048, FILE)},
        {
            "quantization": "awq",
            "max_model_len": 2048,
            "tensor_parallel_size": 2,
            "max_num_batched_tokens": 4096,
            "enforce_eager": True,
        },
        [[0, 1], [2, 3]],
    ),
    "lmi-dist by the MPI engine": Expected(
        "engine=MPI\noption.rolling_batch=lmi-dist\noption.tensor_parallel_degree=4",
        "lmi-dist",
        {
            "option.mpi_mode": (True, ALIAS),
            "option.entryPoint": ("djl_python.huggingface", ALIAS),
            "option.rolling_batch": ("lmi-dist", FILE),
        },
        {"tensor_parallel_size": 4, "distributed_executor_backend": "external_launcher"},
        [[0, 1, 2, 3]],
        4,
    ),
    "deepspeed by its engine": Expected(
        "engine=DeepSpeed\noption.tensor_parallel_degree=2\noption.max_tokens=2048\noption.quantize=dynamic_int8",
        "deepspeed task",
        {
            "option.mpi_mode": (True, ALIAS),
            "option.entryPoint": ("djl_python.deepspeed", ALIAS),
            "option.rolling_batch": ("disable", DEFAULT),
            "option.max_rolling_batch_size": (4, DEFAULT),
            "option.low_cpu_mem_usage": (True, DEFAULT),
        },
        {
            "tensor_parallel": {"tp_size": 2},
            "max_tokens": 2048,
            "triangular_masking": True,
            "return_tuple": True,
        },
        [[0, 1], [2, 3]],
        2,
    ),
    "tensorrt-llm with smoothquant": Expected(
        "engine=MPI\noption.entryPoint=djl_python.tensorrt_llm\noption.quantize=smoothquant\n"
        "option.smoothquant_per_token=true\noption.max_input_len=2048",
        "tensorrt_llm",
        {
            "option.entryPoint": ("djl_python.tensorrt_llm", FILE),
            "option.tensor_parallel_degree": (4, RECOMMENDED),
            "option.rolling_batch": ("trtllm", RECOMMENDED),
            "option.smoothquant_alpha": (0.8, DEFAULT),
            "option.max_output_len": (512, DEFAULT),
        },
        {
            "tensor_parallel_size": 4,
            "quant_config": {"quant_algo": "W8A8_SQ_PER_TENSOR_PER_TOKEN_PLUGIN", "smoothquant_val": 0.8},
        },
        [[0, 1, 2, 3]],
    ),
    "transformers-neuronx": Expected(
        "engine=Python\noption.entryPoint=djl_python.transformers_neuronx\noption.rolling_batch=auto\n"
        "option.n_positions=512\noption.context_length_estimate=256,512\noption.load_in_8bit=True",
        "transformers_neuronx",
        {
            "option.rolling_batch": ("auto", FILE),
            "option.load_in_8bit": (True, FILE),
            "option.dtype": ("fp16", DEFAULT),
            "option.tensor_parallel_degree": (1, DEFAULT),
        },
        {
            "n_positions": 512,
            "context_length_estimate": [256, 512],
            "neuron_config": {"quant": {"quant_dtype": "s8", "dequant_dtype": "f16"}},
            "amp": "f16",
            "batch_size": 32,
        },
        [[]],  # it takes no GPUs
    ),
    "variables alone, as a container gets them": Expected(
        "",
        "vllm",
        {
            "option.rolling_batch": ("vllm", "environment"),
            "option.dtype": ("bf16", "environment"),
            "option.tensor_parallel_degree": (2, "environment default"),
            "option.model_loading_timeout": (3600, "sagemaker"),
            "job_queue_size": (50, "environment default"),
        },
        {"dtype": "bfloat16", "tensor_parallel_size": 2},
        [[0, 1], [2, 3]],
        environment={
            "OPTION_ROLLING_BATCH": "vllm",
            "OPTION_DTYPE": "bfloat16",
            "OPTION_TENSOR_PARALLEL_DEGREE": "2",
            "SAGEMAKER_STARTUP_TIMEOUT": "3600",
            "SERVING_JOB_QUEUE_SIZE": "50",
        },
    ),
    "dynamic batching": Expected(
        "engine=Python\noption.entryPoint=djl_python.huggingface\nbatch_size=8\nmax_batch_delay=50\nminWorkers=2",
        "huggingface pipeline",
        {
            "option.rolling_batch": ("disable", DEFAULT),
            "option.task": ("text-generation", RECOMMENDED),
            "batch_size": (8, FILE),
            "max_batch_delay": (50, FILE),
            "maxWorkers": (2, RECOMMENDED),
            "max_idle_time": (60, DEFAULT),
        },
        {},
        [[0], [1], [2], [3]],
    ),
}
# The variable is stronger than the default that TENSOR_PARALLEL_DEGREE would set.
CONFIGURATIONS["variables alone, as a container gets them"].values["option.tensor_parallel_degree"] = (2, "environment")


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_typical_configuration(name: str, tmp_path: Path) -> None:
    expected = CONFIGURATIONS[name]
    found = explained(tmp_path, expected.properties, FOUR_GPUS, **expected.environment)
    assert found.problems == ()
    assert found.handler == expected.handler
    values = {option.key: (option.value, option.layer) for option in found.options}
    assert {key: values[key] for key in expected.values} == expected.values
    assert expected.given.items() <= dict(found.engine_arguments).items()
    assert [device["gpus"] for device in found.devices] == expected.gpus
    command = " ".join(found.worker_command)
    assert command.startswith("mpirun -np ") == (expected.mpirun is not None)
    assert expected.mpirun is None or f"mpirun -np {expected.mpirun} " in command
    assert "-m lmi_server.worker --link" in command
    assert json.loads(json.dumps(found.as_json_values()))["name"] == found.name


def test_memory_of_a_model_that_does_not_fit(tmp_path: Path) -> None:
    found = explained(tmp_path, "option.rolling_batch=scheduler", NO_GPU)
    assert found.memory["parameters"] == pytest.approx(6.74e9, rel=0.001)
    assert found.memory["weights_bytes"] == 2 * found.memory["parameters"]
    assert found.memory["kv_bytes_per_token"] == 2 * 32 * 4096 * 2
    assert found.memory["kv_tokens"] == 32 * 4096
    assert "the weights take about 12.55 GiB, main memory has 8.00 GiB free" in found.warnings


@pytest.mark.parametrize(
    ("properties", "division"),
    [
        (
            "engine=Python\noption.tensor_parallel_degree=4",
            "accelerate places whole layers on the 4 GPUs of a worker (device_map=auto), which compute one after the"
            " other; the KV cache of a layer is on its GPU",
        ),
        ("engine=Python\noption.tensor_parallel_degree=4\noption.device_map=cuda:1", None),
        ("engine=Python", None),
        (
            "engine=MPI\noption.rolling_batch=scheduler\noption.tensor_parallel_degree=4",
            "each of 4 ranks under mpirun has its part of every layer",
        ),
    ],
)
def test_how_several_gpus_divide_a_model(tmp_path: Path, properties: str, division: str | None) -> None:
    found = explained(tmp_path, properties, FOUR_GPUS)
    assert found.division == division
    printed = Console(width=80, record=True, file=io.StringIO())
    print_explanation(found, printed, with_defaults=False)
    assert (f"devices: {division}" in printed.export_text()) == (division is not None)


def test_the_room_for_the_kv_cache_and_the_need_are_both_shown(tmp_path: Path) -> None:
    found = explained(
        tmp_path, "option.rolling_batch=vllm\noption.max_model_len=1024\noption.max_rolling_batch_size=32", FOUR_GPUS
    )
    printed = Console(width=100, record=True, file=io.StringIO())
    print_explanation(found, printed, with_defaults=False)
    text = printed.export_text()
    needed = re.search(r"KV cache that is needed at most +[\d.]+ GiB for (\d+) tokens", text)
    fits = re.search(r"KV cache that fits +(\d+) tokens", text)
    assert needed is not None
    assert fits is not None
    assert int(fits[1]) > int(needed[1])


@pytest.mark.parametrize(
    ("config", "shown"),
    [
        ({"architectures": ["MptForCausalLM"], "max_seq_len": 512}, r"needed at most +[\d.]+ GiB for 16384 tokens"),
        ({"architectures": ["MptForCausalLM"]}, r"needed at most +unknown: config.json names no context"),
    ],
)
def test_the_need_of_a_kv_cache_follows_from_the_context(config: dict[str, Any], shown: str, tmp_path: Path) -> None:
    sizes = {"n_layers": 2, "d_model": 128, "n_heads": 4, "hidden_size": 128, "num_hidden_layers": 2}
    (tmp_path / "serving.properties").write_text("")
    (tmp_path / "config.json").write_text(json.dumps({**sizes, "num_attention_heads": 4, **config}))
    text = printed_explanation(explain(inspect_model(tmp_path, {}, machine=NO_GPU)))
    assert re.search(f"KV cache that is {shown}", text), text


def test_a_model_without_a_kv_cache_has_no_lines_about_it(tmp_path: Path) -> None:
    (tmp_path / "serving.properties").write_text("option.task=automatic-speech-recognition")
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["WhisperForConditionalGeneration"]}))
    text = printed_explanation(explain(inspect_model(tmp_path, {}, machine=NO_GPU)))
    assert "Memory of one worker" in text
    assert "?" not in text
    assert "KV cache that" not in text


def printed_explanation(found: Explanation) -> str:
    printed = Console(width=100, record=True, file=io.StringIO())
    print_explanation(found, printed, with_defaults=False)
    return printed.export_text()


def test_layers_on_several_gpus_share_the_memory(tmp_path: Path) -> None:
    found = explained(tmp_path, "option.tensor_parallel_degree=4", FOUR_GPUS)
    assert found.memory["devices"] == 4
    assert found.memory["weights_bytes"] == pytest.approx(2 * 6.74e9 / 4, rel=0.001)
    assert explained(tmp_path, "option.tensor_parallel_degree=4", NO_GPU).memory["devices"] == 1


def test_memory_is_shared_by_the_devices_of_a_worker(tmp_path: Path) -> None:
    found = explained(
        tmp_path, "option.rolling_batch=vllm\noption.max_model_len=1024\noption.max_rolling_batch_size=32", FOUR_GPUS
    )
    assert found.memory["devices"] == 4
    assert found.memory["weights_bytes"] == pytest.approx(2 * 6.74e9 / 4, rel=0.001)
    assert found.memory["kv_bytes"] == 32 * 1024 * 524288 / 4
    room = found.memory["available_bytes"] - found.memory["weights_bytes"]
    assert found.memory["kv_tokens_that_fit"] == room // found.memory["kv_bytes_per_token"] > 32 * 1024
    assert found.memory["kv_tokens"] == 32 * 1024
    assert not [warning for warning in found.warnings if "memory" in warning]


def test_weights_are_measured_where_they_are(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    found = explained(tmp_path, "option.dtype=fp32", NO_GPU)
    assert (found.memory["parameters"], found.memory["weights_bytes"]) == (500, 2000)


@pytest.mark.parametrize(("method", "bits"), [("bitsandbytes4", 4), ("q8_0", 8.5), ("q4_0", 4.5), ("int8", 8)])
def test_weights_that_are_quantised_while_loading(tmp_path: Path, method: str, bits: float) -> None:
    found = explained(tmp_path, f"option.quantize={method}\noption.dtype=bf16", NO_GPU)
    embeddings = 2 * LLAMA_7B["vocab_size"] * LLAMA_7B["hidden_size"]
    assert found.memory["unquantized_bytes"] == 2 * found.memory["parameters"]
    quantised = (found.memory["parameters"] - embeddings) * bits / 8
    assert found.memory["weights_bytes"] == pytest.approx(quantised + 2 * embeddings, abs=1)


def test_recommendations_without_a_gpu(tmp_path: Path) -> None:
    machine = replace(NO_GPU, cores=4)
    found = explained(tmp_path, "option.rolling_batch=vllm", machine, TOKENIZERS_PARALLELISM="true")
    values = {option.key: (option.value, option.layer) for option in found.options}
    assert values["option.engine_process"] == ("worker", RECOMMENDED)
    assert values["option.threads"] == (4, RECOMMENDED)
    assert values["option.compilation"] == ("background", RECOMMENDED)
    assert found.engine_arguments["enforce_eager"] is False
    assert "TORCH_COMPILE_DISABLE" not in found.worker_environment
    assert found.worker_environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert int(found.worker_environment["GOMP_SPINCOUNT"]) > 0
    assert found.worker_environment["OMP_PROC_BIND"] == "false"
    assert found.worker_environment["TOKENIZERS_PARALLELISM"] == "true"  # whoever starts the server decides
    assert found.memory["kv_reserved_bytes"] == 2 * GIB


@pytest.mark.parametrize(
    ("properties", "machine", "threads"),
    [
        ("", {}, None),  # the library starts one for each core itself
        ("minWorkers=2", {}, 4),
        ("maxWorkers=3", {}, 2),
        ("minWorkers=20", {}, 1),
        ("", {"cores": 3}, 3),  # a container's quota, of which libraries know nothing
        ("minWorkers=2", {"omp_threads": 5, "cores": 5}, None),
        ("minWorkers=2\noption.threads=7", {}, 7),
        ("minWorkers=2", {"gpus": (Gpu("0", 24 * GIB),)}, None),
        ("minWorkers=2\noption.rolling_batch=vllm", {}, 4),
        ("minWorkers=2\noption.rolling_batch=deepspeed\noption.tensor_parallel_degree=2", {}, 2),
    ],
)
def test_workers_on_the_cpu_divide_the_cores(
    tmp_path: Path, properties: str, machine: dict[str, Any], threads: int | None
) -> None:
    found = explained(tmp_path, properties, replace(NO_GPU, **{"cores": 8, "seen_cores": 8} | machine))
    values = {option.key: option.value for option in found.options}
    assert values["option.threads"] == threads


@pytest.mark.parametrize(
    ("properties", "uncompiled"),
    [
        ("option.enable_lora=true", True),
        ("option.tensor_parallel_degree=2", True),
        ("option.engine_process=own", True),
        ("option.enforce_eager=true", True),
        ("option.tensor_parallel_degree=2\noption.enforce_eager=false", False),
        ("option.tensor_parallel_degree=2\noption.compilation=start", False),
    ],
)
def test_what_is_not_compiled_in_the_background(properties: str, uncompiled: bool, tmp_path: Path) -> None:
    found = explained(tmp_path, f"option.rolling_batch=vllm\n{properties}", NO_GPU)
    assert found.engine_arguments["enforce_eager"] is uncompiled


def test_a_compilation_that_cannot_run_in_the_background_gives_a_warning(tmp_path: Path) -> None:
    lines = "option.rolling_batch=vllm\noption.compilation=background\n"
    found = explained(tmp_path, f"{lines}option.enable_lora=true", NO_GPU)
    assert any("option.compilation" in warning and "enable_lora" in warning for warning in found.warnings)
    assert not any("option.compilation" in warning for warning in explained(tmp_path, lines, NO_GPU).warnings)


@pytest.mark.parametrize(
    ("properties", "reserved"),
    [
        ("option.kv_cache_memory_gb=1.5", 1.5 * GIB),
        ("option.gpu_memory_utilization=0.5", None),
        ("option.max_model_len=1024\noption.max_rolling_batch_size=2", 2 * 1024 * 524288),
    ],
)
def test_the_kv_cache_that_a_worker_reserves(properties: str, reserved: float | None, tmp_path: Path) -> None:
    found = explained(tmp_path, f"option.rolling_batch=vllm\n{properties}", NO_GPU)
    assert found.memory["kv_reserved_bytes"] == reserved


def test_with_gpus_the_engine_is_apart(tmp_path: Path) -> None:
    found = explained(tmp_path, "option.rolling_batch=vllm", FOUR_GPUS)
    assert found.memory["kv_reserved_bytes"] is None
    assert {"VLLM_ENABLE_V1_MULTIPROCESSING", "GOMP_SPINCOUNT"}.isdisjoint(found.worker_environment)


def test_too_few_gpus_are_a_warning(tmp_path: Path) -> None:
    found = explained(tmp_path, "option.rolling_batch=vllm\noption.tensor_parallel_degree=8", FOUR_GPUS)
    assert [warning for warning in found.warnings if "a worker takes 8 GPUs" in warning]
    assert found.devices == ()
    assert not found.can_be_served


def test_required_memory_that_is_not_there_is_a_warning(tmp_path: Path) -> None:
    found = explained(tmp_path, "required_memory_mb=100000", NO_GPU)
    assert [warning for warning in found.warnings if "100500 MiB are needed, 8192 are free" in warning]
    found = explained(tmp_path, "gpu.required_memory_mb=24000\nrequired_memory_mb=1000", FOUR_GPUS)
    assert [warning for warning in found.warnings if 'gpu.required_memory_mb = "24000": ' in warning]
    assert not [warning for warning in found.warnings if " required_memory_mb" in warning]


def test_reserved_memory_alone_counts_if_it_is_set(tmp_path: Path) -> None:
    found = explained(tmp_path, "reserved_memory_mb=9000", NO_GPU)
    assert [warning for warning in found.warnings if 'reserved_memory_mb = "9000": with what stays' in warning]
    found = explained(tmp_path, "gpu.reserved_memory_mb=100000", FOUR_GPUS)
    assert [warning for warning in found.warnings if 'gpu.reserved_memory_mb = "100000": ' in warning]
    assert not [warning for warning in explained(tmp_path, "", NO_GPU).warnings if "memory_mb" in warning]


def test_an_interpreter_that_is_not_there_is_a_warning(tmp_path: Path) -> None:
    found = explained(tmp_path, "option.pythonExecutable=/no/such/python", NO_GPU)
    assert 'option.pythonExecutable = "/no/such/python": there is no such program' in found.warnings
    assert found.worker_command[0] == "/no/such/python"
    found = explained(tmp_path, "option.pythonExecutable=python3", NO_GPU)
    assert found.worker_command[0] == sys.executable


def test_problems_are_in_the_order_of_the_file(tmp_path: Path) -> None:
    found = explained(tmp_path, "option.dtype=x\nminWorkers=x\noption.model_loading_timeout=x\nmaxWorkers=x", NO_GPU)
    assert [problem.split(":")[1] for problem in found.problems] == ["1", "2", "3", "4"]


def test_explain_says_what_happens_with_an_undeclared_key(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("def handle(inputs): ...")
    (own,) = explained(tmp_path, "option.score_limit=3", NO_GPU).unknown
    assert own.note == "passed on to the handler"


def test_explain_says_which_parser_the_template_means(tmp_path: Path) -> None:
    notes = []
    for template in ("{% if tools %}<tool_call>", "{% if tools %}", "{{ messages }}"):
        (tmp_path / "chat_template.jinja").write_text(template)
        options = explained(tmp_path, f"option.model_id={tmp_path}", NO_GPU).options
        notes.append(next(option.note for option in options if option.key == "option.tool_call_parser"))
    assert [note[:34] for note in notes] == [
        "hermes",
        "none: the chat template teaches no",
        "none: the chat template takes no to"[:34],
    ]


def test_an_argument_of_the_engine_is_passed_on(tmp_path: Path) -> None:
    found = explained(tmp_path, "option.rolling_batch=vllm\noption.nonsense=1\noption.max_seqs=1", NO_GPU)
    assert [option.key for option in found.unknown] == ["option.nonsense", "option.max_seqs"]
    assert "nonsense" not in found.engine_arguments
    assert any("unknown key option.nonsense" in warning for warning in found.warnings)


def test_each_decided_value_has_a_source(tmp_path: Path) -> None:
    found = explained(tmp_path, "\noption.dtype=bf16", NO_GPU, OPTION_REVISION="main")
    places = {option.key: option.place for option in found.options}
    assert places["option.dtype"] == f"{tmp_path / 'serving.properties'}:2"
    assert places["option.revision"] == "variable OPTION_REVISION"
    assert places["option.task"] == ""


@pytest.mark.parametrize(("entry_point", "package"), [("sklearn", "sklearn"), ("xgboost", "xgboost")])
def test_an_installed_engine_is_found(entry_point: str, package: str, tmp_path: Path) -> None:
    (tmp_path / "serving.properties").write_text(f"option.entryPoint={entry_point}")
    found = explain(inspect_model(tmp_path, {}))
    missing = f"{entry_point} needs the Python package {package}, which is not installed"
    assert (missing in found.unavailable) == (not found.can_be_served) == (find_spec(package) is None)


@pytest.mark.parametrize(
    ("more", "title", "package", "command"),
    [
        (
            "option.rolling_batch=auto",
            "transformers_neuronx",
            "optimum.neuron",
            "pip install optimum-neuron[neuronx],",
        ),
        ("option.fuse_qkv=true", "transformers_neuronx", "optimum.neuron", "pip install optimum-neuron[neuronx],"),
        (
            "option.load_in_8bit=true",
            "transformers_neuronx",
            "transformers_neuronx",
            "pip install transformers-neuronx, from Neuron's own package index; or remove option.load_in_8bit for"
            " optimum-neuron",
        ),
        (
            "option.model_loader=optimum",
            "transformers_neuronx",
            "optimum.neuron",
            "pip install optimum-neuron[neuronx],",
        ),
        ("option.rolling_batch=vllm", "vllm on Neuron", "vllm_neuron", "pip install vllm-neuron,"),
    ],
)
def test_a_model_for_neuron_says_which_package_and_device_are_missing(
    tmp_path: Path, more: str, title: str, package: str, command: str
) -> None:
    (tmp_path / "serving.properties").write_text(f"option.entryPoint=djl_python.transformers_neuronx\n{more}")
    bare = explain(inspect_model(tmp_path, {}, machine=NO_GPU)).unavailable
    assert any(
        f"{title} needs the Python package {package}, which is not installed; run: {command}" in line for line in bare
    )
    assert f"{title} needs a Neuron device, and none is visible; serve the model on a machine with one" in bare
    there = replace(
        NO_GPU, neuron_devices=1, engines=frozenset({"transformers_neuronx", "optimum.neuron", "vllm_neuron", "vllm"})
    )
    assert explain(inspect_model(tmp_path, {}, machine=there)).unavailable == ()


TRAINIUM = replace(NO_GPU, neuron_devices=2, neuron_cores=tuple(Gpu(str(core), 16 * GIB) for core in range(4)))


@pytest.mark.parametrize(
    ("degree", "resolved", "sets"),
    [("max", 4, [[0, 1, 2, 3]]), ("2", 2, [[0, 1], [2, 3]]), ("1", 1, [[0], [1], [2], [3]])],
)
@pytest.mark.parametrize("rolling_batch", ["auto", "vllm"])
def test_workers_share_the_neuron_cores(
    tmp_path: Path, degree: str, resolved: int, sets: list[list[int]], rolling_batch: str
) -> None:
    text = f"option.rolling_batch={rolling_batch}\noption.tensor_parallel_degree={degree}\nnc.minWorkers=1"
    found = explained(tmp_path, f"option.entryPoint=djl_python.transformers_neuronx\n{text}", TRAINIUM)
    values = {option.key: option.value for option in found.options}
    assert values["option.tensor_parallel_degree"] == resolved
    assert [(device["kind"], device["gpus"]) for device in found.devices] == [("nc", cores) for cores in sets]
    assert found.worker_environment["NEURON_RT_VISIBLE_CORES"] == ",".join(map(str, sets[0]))
    assert "CUDA_VISIBLE_DEVICES" not in found.worker_environment


def test_neuron_cores_that_are_not_there_are_named(tmp_path: Path) -> None:
    neuron = "option.entryPoint=djl_python.transformers_neuronx\noption.tensor_parallel_degree="
    (shortage,) = [line for line in explained(tmp_path, f"{neuron}8", TRAINIUM).warnings if "a worker takes" in line]
    assert "a worker takes 8 Neuron cores" in shortage
    assert "4 are visible; lower it, use max, or show more of them in NEURON_RT_VISIBLE_CORES" in shortage
    unknown = explained(tmp_path, f"{neuron}max", replace(TRAINIUM, neuron_cores=()))
    assert {option.key: option.value for option in unknown.options}["option.tensor_parallel_degree"] == "max"
    on_processor = explained(tmp_path, "option.entryPoint=djl_python.huggingface", TRAINIUM)
    assert [device["kind"] for device in on_processor.devices] == ["cpu"]  # torch knows no Neuron core


def test_a_package_that_is_not_installed_is_an_error_unless_the_model_brings_it(tmp_path: Path) -> None:
    (tmp_path / "serving.properties").write_text("option.entryPoint=sklearn")
    lines = ("sklearn needs the Python package sklearn, which is not installed",)
    found = explain(inspect_model(tmp_path, {}, machine=NO_GPU))
    assert (found.unavailable, found.warnings, found.can_be_served) == (lines, (), False)
    (tmp_path / "requirements.txt").write_text("scikit-learn")
    found = explain(inspect_model(tmp_path, {}, machine=NO_GPU))
    assert (found.unavailable, found.warnings, found.can_be_served) == ((), lines, True)
