"""Model files of Ray: RayLLM's YAML and LLMConfig become keys of serving.properties, and errors name file and line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from paths import ROOT
from rayllm_files import AUTOSCALING

from lmi_server.artifacts.location import RAY_MODEL_FILE
from lmi_server.configuration.model_file.chat_template import chat_template
from lmi_server.configuration.model_file.rayllm import PromptFormat
from lmi_server.configuration.model_file.read import ModelFile, read_model_file
from lmi_server.configuration.resolve import inspect_model
from lmi_server.contract.errors import ConfigurationError
from lmi_server.explain.reference_page import with_tables
from lmi_server.machine.inventory import Machine

pytest.importorskip("yaml")

CPU = Machine(total_bytes=2**34, available_bytes=2**33, cores=4, engines=frozenset({"torch", "transformers", "vllm"}))

EVERYTHING = (
    AUTOSCALING
    + """\
  max_concurrent_queries: 32
  max_queued_requests: 100
  ray_actor_options:
    resources: {"accelerator_type:A10G": 0.01}
engine_config:
  model_id: team/name
  hf_model_id: team/weights
  type: VLLMEngine
  engine_kwargs:
    trust_remote_code: true
    max_num_batched_tokens: 4096
    max_num_seqs: 64
    gpu_memory_utilization: 0.95
    quantization: awq
    hf_overrides: {factor: 2.0}
  max_total_tokens: 4096
  generation:
    prompt_format: {system: "{instruction}", assistant: "{instruction}", trailing_assistant: "", user: "{instruction}"}
    stopping_sequences: ["<unk>", "a, b"]
  runtime_env:
    env_vars: {HF_TOKEN: x, THREADS: 4}
    pip: [sentencepiece]
scaling_config:
  num_workers: 2
  num_gpus_per_worker: 1
  num_cpus_per_worker: 8
  placement_strategy: STRICT_PACK
  resources_per_worker: {"accelerator_type:A10G": 0.01}
"""
)
MINIMAL = "engine_config: {model_id: team/name}\n"


def read(tmp_path: Path, text: str) -> ModelFile:
    path = tmp_path / "m.yaml"
    path.write_text(text)
    return read_model_file(path)


def raw(found: ModelFile) -> dict[str, str]:
    return {key: source.raw for key, source in found.given.items()}


def problems(tmp_path: Path, text: str) -> list[str]:
    with pytest.raises(ConfigurationError) as caught:
        read(tmp_path, text)
    return [line.removeprefix(f"{tmp_path}/") for line in caught.value.message.splitlines()]


def test_every_section_of_rayllm_becomes_keys_of_serving_properties(tmp_path: Path) -> None:
    found = read(tmp_path, EVERYTHING)
    keys = raw(found)
    assert keys.pop("option.chat_template").startswith("{#-")
    assert keys == {
        "option.served_model_name": "team/name",
        "option.model_id": "team/weights",
        "option.rolling_batch": "vllm",
        "option.trust_remote_code": "true",
        "option.max_rolling_batch_prefill_tokens": "4096",
        "option.max_rolling_batch_size": "32",
        "option.gpu_memory_utilization": "0.95",
        "option.quantize": "awq",
        "option.hf_overrides": '{"factor": 2.0}',
        "option.max_model_len": "4096",
        "option.tensor_parallel_degree": "2",
        "option.stop_sequence": '["<unk>", "a, b"]',
        "option.env": "HF_TOKEN=x,THREADS=4",
        "job_queue_size": "100",
    }
    assert found.model_id == "team/name"
    assert found.given["option.max_rolling_batch_prefill_tokens"].place == f"{tmp_path / 'm.yaml'}:22"
    [pip] = found.only_on_clusters
    assert "m.yaml:33: engine_config.runtime_env.pip has an effect on a cluster of Ray only" in pip


def test_the_present_names_are_those_of_ray_serve(tmp_path: Path) -> None:
    text = MINIMAL + (
        "deployment_config:\n  max_ongoing_requests: 7\n  autoscaling_config: {target_ongoing_requests: 3}\n"
        "  num_replicas: null\n"
    )
    found = read(tmp_path, text)
    assert raw(found)["option.max_rolling_batch_size"] == "7"
    scaling = found.content.deployment_config.autoscaling_config
    assert scaling is not None
    assert scaling.target_ongoing_requests == 3


def test_an_llm_config_is_read_too(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        """\
model_loading_config: {model_id: qwen, model_source: Qwen/Qwen2.5-0.5B-Instruct}
llm_engine: vLLM
accelerator_type: L4
engine_kwargs: {tensor_parallel_size: 2, max_model_len: 8192}
lora_config: {dynamic_lora_loading_path: "s3://bucket/loras", max_num_adapters_per_replica: 16}
placement_group_config: {bundle_per_worker: {CPU: 1, GPU: 1}, strategy: PACK}
runtime_env: {env_vars: {A: b}}
log_engine_metrics: true
deployment_config: {autoscaling_config: {min_replicas: 1, max_replicas: 2}, max_ongoing_requests: 64}
""",
    )
    assert raw(found) == {
        "option.served_model_name": "qwen",
        "option.model_id": "Qwen/Qwen2.5-0.5B-Instruct",
        "option.rolling_batch": "vllm",
        "option.tensor_parallel_degree": "2",
        "option.max_model_len": "8192",
        "option.enable_lora": "true",
        "option.max_cpu_loras": "16",
        "option.dynamic_lora_loading_path": "s3://bucket/loras",
        "option.max_num_adapters_per_replica": "16",
        "option.env": "A=b",
        "option.max_rolling_batch_size": "64",
    }
    [warning] = found.warnings
    assert "log_engine_metrics has no effect here" in warning


def test_all_problems_of_a_file_are_named_with_their_lines(tmp_path: Path) -> None:
    text = """\
deployment_config:
  autoscaling_config: {min_replica: 1, max_replicas: -1}
  max_concurrent_queries: many
  max_ongoing_requests: 3
engine_config:
  hf_model_id: 7
  engine_kwargs: []
  type: Other
  generation:
    prompt_format:
      system: "no name"
      assistant: "{instruction}"
      trailing_assistant: ""
      user: "{instruction} {other}"
scaling_config:
  num_gpus_per_worker: 2
  placement_strategy: PACKED
  worker: true
"""
    assert problems(tmp_path, text) == [
        'm.yaml:2: deployment_config.autoscaling_config.max_replicas = "-1" is not allowed; allowed: an integer of 1'
        " or more",
        "m.yaml:2: unknown key deployment_config.autoscaling_config.min_replica; did you mean min_replicas?",
        'm.yaml:3: deployment_config.max_concurrent_queries = "many" is not allowed; allowed: an integer of 1 or more',
        "m.yaml:4: max_ongoing_requests is not allowed beside max_concurrent_queries, which is the same key; remove"
        " one",
        "m.yaml:5: engine_config.model_id is missing: Name by which requests ask for the model.",
        'm.yaml:6: engine_config.hf_model_id = "7" is not allowed; allowed: a text',
        "m.yaml:7: engine_config.engine_kwargs = list is not allowed; allowed: a mapping",
        'm.yaml:8: engine_config.type = "Other" is not allowed; allowed: VLLMEngine, TRTLLMEngine, EmbeddingEngine',
        'm.yaml:11: engine_config.generation.prompt_format.system = "no name" is not allowed; allowed: a text with'
        " {instruction}, and {{ and }} for braces",
        'm.yaml:14: engine_config.generation.prompt_format.user = "{instruction} {other}" is not allowed; allowed: a'
        " text with {instruction}, perhaps {system}, and {{ and }} for braces",
        'm.yaml:16: scaling_config.num_gpus_per_worker = "2" is not allowed; allowed: a number from 0 to 1; use'
        " num_workers for more GPUs",
        'm.yaml:17: scaling_config.placement_strategy = "PACKED" is not allowed; allowed: PACK, STRICT_PACK, SPREAD,'
        " STRICT_SPREAD",
        "m.yaml:18: unknown key scaling_config.worker; did you mean num_workers?",
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: [", "m.yaml:1: is not valid YAML: expected the node content, but found '<stream end>'"),
        ("a: 1\na: 2\n", "m.yaml:2: a is given twice; remove one"),
        ("name: chain\nworkflow: {out: [a, in]}\n", "m.yaml: workflows are not served; register each of its models by"),
        (
            "model_loading_config: {model_id: a}\naccelerator_config: {kind: tpu}\n",
            "m.yaml:2: accelerator_config is not available; use GPUs, Neuron cores or kind: cpu",
        ),
        (
            "- 1\n",
            "m.yaml: is no model file; it needs engine_config (RayLLM), model_loading_config (LLMConfig), or llm_",
        ),
        (
            "engine_config:\n  model_id: a/b\n  gcs_mirror_config:\n    bucket_uri: az://a/b\n",
            "m.yaml:4: engine_config.gcs_mirror_config.bucket_uri is not available; the server fetches from S3, Google",
        ),
        (
            "engine_config: {model_id: a, engine_kwargs: {tensor_parallel_size: 2}}\nscaling_config:\n  num_workers: 4",
            'm.yaml:3: scaling_config.num_workers = "4" is not allowed; allowed: tensor_parallel_size x pipeline_',
        ),
        (
            "engine_config:\n  model_id: a/b\n  runtime_env:\n    env_vars:\n      A: 'b,c'\n",
            'm.yaml:5: engine_config.runtime_env.env_vars.A = "b,c" is not allowed; allowed: a text without a comma',
        ),
    ],
)
def test_what_cannot_be_read_or_served_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    found = problems(tmp_path, text)
    assert (len(found), found[0][: len(problem)]) == (1, problem)


@pytest.mark.slow
def test_an_argument_that_no_engine_knows_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    text = "engine_config:\n  model_id: a/b\n  engine_kwargs:\n    max_num_sequence: 1\n    entryPoint: x.py\n"
    assert problems(tmp_path, text) == [
        "m.yaml:4: unknown key engine_config.engine_kwargs.max_num_sequence; did you mean max_num_seqs?",
        "m.yaml:5: unknown key engine_config.engine_kwargs.entryPoint; it is no argument of the engine",
    ]


def test_a_model_directory_may_have_a_model_file(tmp_path: Path) -> None:
    (tmp_path / RAY_MODEL_FILE).write_text(MINIMAL + "deployment_config:\n  max_ongoing_requests: 5\n")
    found = inspect_model(tmp_path, {}, machine=CPU)
    source = found.sources["option.max_rolling_batch_size"]
    assert (source.raw, source.layer, source.line) == ("5", "model file", 3)
    assert (found.location, found.options.served_model_name) == ("team/name", ("team/name",))


def test_a_path_is_relative_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    assert raw(read(tmp_path, "engine_config: {model_id: ./weights}\n"))["option.model_id"] == str(tmp_path / "weights")


def rendered(prompt: dict[str, Any], *messages: tuple[str, str]) -> str:
    jinja2 = pytest.importorskip("jinja2")

    def raise_exception(text: str) -> None:
        raise ValueError(text)

    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)  # as transformers and vLLM have it
    environment.globals["raise_exception"] = raise_exception
    template = environment.from_string(chat_template(PromptFormat.model_validate(prompt)))
    chat = [{"role": role, "content": content} for role, content in messages]
    return str(template.render(messages=chat, add_generation_prompt=True))


TAGS = {
    "system": "[system] {instruction} [/system] ",
    "assistant": "[assistant] {instruction} [/assistant]\n ",
    "trailing_assistant": "[assistant]\n",
    "user": '[user] "{{x}}" {instruction} [/user] ',
}
IN_USER = {**TAGS, "user": "[user] {system}{instruction} [/user]", "system_in_user": True}


@pytest.mark.parametrize(
    ("prompt", "messages", "expected"),
    [
        (TAGS, [("user", " hello ")], '[user] "{x}" hello [/user] [assistant]\n'),
        (TAGS | {"strip_whitespace": False}, [("user", " hello ")], '[user] "{x}"  hello  [/user] [assistant]\n'),
        (
            TAGS,
            [("user", "a"), ("system", "s"), ("assistant", "b"), ("user", "c")],
            '[system] s [/system] [user] "{x}" a [/user] [assistant] b [/assistant]\n [user] "{x}" c [/user]'
            " [assistant]\n",
        ),
        (
            TAGS | {"default_system_message": "d 😀"},
            [("user", "a")],
            '[system] d 😀 [/system] [user] "{x}" a [/user] [assistant]\n',
        ),
        (TAGS, [("system", ""), ("user", "a")], '[user] "{x}" a [/user] [assistant]\n'),
        (
            TAGS | {"add_system_tags_even_if_message_is_empty": True},
            [("user", "a")],
            '[system]  [/system] [user] "{x}" a [/user] [assistant]\n',
        ),
        (
            IN_USER,
            [("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c")],
            "[user] [system] s [/system] a [/user][assistant] b [/assistant]\n [user] c [/user][assistant]\n",
        ),
        (IN_USER, [("user", "a")], "[user] a [/user][assistant]\n"),
    ],
)
def test_a_prompt_format_makes_the_prompt_that_rayllm_made(
    prompt: dict[str, Any], messages: list[tuple[str, str]], expected: str
) -> None:
    assert rendered(prompt, *messages) == expected


def test_a_prompt_format_refuses_what_it_has_no_words_for() -> None:
    with pytest.raises(ValueError, match="only one system message"):
        rendered(TAGS, ("system", "a"), ("system", "b"))
    with pytest.raises(ValueError, match="roles of messages"):
        rendered(TAGS, ("tool", "a"))


def test_the_tables_of_keys_are_current() -> None:
    page = (ROOT / "docs/ray-keys.md").read_text(encoding="utf-8")
    assert with_tables(page) == page, "run: python -m lmi_server.explain.reference_page docs"


SPREAD_OUT = {
    "rayllm": (
        "engine_config: {model_id: a}\nscaling_config: {num_workers: %d, placement_strategy: %s}\n",
        "m.yaml:2: scaling_config.placement_strategy",
    ),
    "deployment": (
        "engine_config: {model_id: a}\nscaling_config: {num_workers: %d}\n"
        "deployment_config: {placement_group_strategy: %s}\n",
        "m.yaml:3: deployment_config.placement_group_strategy",
    ),
    "llm config": (
        "model_loading_config: {model_id: a}\nengine_kwargs: {tensor_parallel_size: %d}\n"
        "placement_group_config: {bundles: [{CPU: 1}], strategy: %s}\n",
        "m.yaml:3: placement_group_config.strategy",
    ),
}


@pytest.mark.parametrize(("text", "label"), list(SPREAD_OUT.values())[:2], ids=list(SPREAD_OUT)[:2])
def test_workers_of_a_replica_are_not_to_be_on_different_nodes(tmp_path: Path, text: str, label: str) -> None:
    (warning,) = read(tmp_path, text % (2, "STRICT_SPREAD")).warnings
    assert warning == (
        f"{tmp_path}/{label} = STRICT_SPREAD puts the 2 workers of a replica on as many nodes, and they have to be on"
        " one; use STRICT_PACK"
    )
    assert not read(tmp_path, text % (2, "STRICT_PACK")).warnings
    assert not read(tmp_path, text % (1, "STRICT_SPREAD")).warnings


def test_bundles_count_as_the_workers_of_a_replica(tmp_path: Path) -> None:
    text, label = SPREAD_OUT["llm config"]
    several = text.replace("[{CPU: 1}]", "[{CPU: 1}, {CPU: 1}]")
    assert label in read(tmp_path, several % (2, "STRICT_SPREAD")).warnings[0]
    assert not read(tmp_path, text % (1, "STRICT_SPREAD")).warnings
