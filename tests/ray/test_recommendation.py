"""`lmi-server recommend` and the model files: the rule keeps to the estimate of memory, and the samples are current."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
from forked_servers import run_command
from paths import SAMPLES

from lmi_server.configuration.checks.memory_estimate import Estimate
from lmi_server.configuration.resolve import inspect_model
from lmi_server.contract.errors import ConfigurationError
from lmi_server.ray.recommendation.accelerators import ACCELERATORS, FAMILIES, accelerator_of
from lmi_server.ray.recommendation.files import write_files
from lmi_server.ray.recommendation.recommendation import (
    DEGREES,
    Goal,
    ModelShape,
    find_accelerator,
    find_model,
    for_degree,
    memory_on,
    recommend,
)

GOALS: tuple[Goal, ...] = ("latency", "throughput")
BILLIONS = {
    "llama-3.1-8b": 8.0,
    "llama-3.1-70b": 70.6,
    "qwen2.5-32b": 32.8,
    "mistral-7b": 7.2,
    "mixtral-8x7b": 46.7,
    "gemma-2-9b": 9.2,
    "llama-3.2-3b": 3.2,
    "llama-3.3-70b": 70.6,
    "qwen3-4b": 4.02,
    "qwen3-8b": 8.2,
    "qwen3-14b": 14.8,
    "qwen3-32b": 32.8,
    "phi-4": 14.7,
    "mistral-small-24b": 23.6,
}


def test_the_shapes_of_the_families_have_the_published_sizes() -> None:
    for family, billions in BILLIONS.items():
        parameters = memory_on(find_model(family), find_accelerator("H100"), 1, 8192).parameters
        assert parameters == pytest.approx(billions * 1e9, rel=0.02), family


def test_what_is_recommended_fits_by_the_estimate_of_memory() -> None:
    """The estimate for exactly this batch raises no warning, and has room for its requests."""
    wrong = []
    for family in FAMILIES:
        for accelerator in ACCELERATORS.values():
            for goal in GOALS:
                for degree in DEGREES:
                    model = find_model(family)
                    found = for_degree(model, accelerator, degree, goal)
                    if found is None:
                        continue
                    memory: Estimate = memory_on(model, accelerator, degree, found.max_model_len, found.max_num_seqs)
                    fit = memory.kv_tokens_that_fit or 0
                    average = min(found.max_model_len, 2048)
                    if memory.warnings() or fit < found.max_num_seqs * average:
                        wrong.append((family, accelerator.name, goal, degree))
    assert wrong == []


def test_the_families_have_the_published_bytes_of_kv_cache_per_token() -> None:
    """Two for keys and values, layers, heads of keys and values, length of a head, and two bytes of each number."""
    published = {
        "llama-3.1-8b": 2 * 32 * 8 * 128 * 2,
        "llama-3.1-70b": 2 * 80 * 8 * 128 * 2,
        "qwen2.5-32b": 2 * 64 * 8 * 128 * 2,
        "mistral-7b": 2 * 32 * 8 * 128 * 2,
        "mixtral-8x7b": 2 * 32 * 8 * 128 * 2,
        "gemma-2-9b": 2 * 42 * 8 * 256 * 2,
    }
    device = find_accelerator("H100")
    assert {name: memory_on(find_model(name), device, 1, 8192).kv_bytes_per_token for name in FAMILIES} == published


def test_devices_beyond_the_heads_of_keys_and_values_hold_copies() -> None:
    model = replace(find_model("llama-3.1-8b"), config=dict(FAMILIES["llama-3.1-8b"][1]) | {"num_key_value_heads": 2})
    per_token = [memory_on(model, find_accelerator("H100"), degree, 8192).kv_bytes_per_token for degree in DEGREES]
    whole = 2 * 32 * 2 * 128 * 2
    assert per_token == [whole, whole // 2, whole // 2, whole // 2]


def shaped(**shape: object) -> ModelShape:
    """Return Llama 3.1 8B with another shape."""
    model = find_model("llama-3.1-8b")
    return replace(model, config={**model.config, **shape})


def test_heads_of_keys_and_values_are_divided_or_copied_evenly() -> None:
    """vLLM refuses anything else: ten heads go to one, two, five or ten devices."""
    uneven = shaped(hidden_size=5120, num_attention_heads=40, num_key_value_heads=10)
    fitting = [degree for degree in DEGREES if for_degree(uneven, find_accelerator("H100"), degree, "latency")]
    assert fitting == [1, 2]


def test_a_checkpoint_in_32_bits_is_served_in_16() -> None:
    device = find_accelerator("A10G")
    assert recommend(shaped(torch_dtype="float32"), device, "throughput") == recommend(shaped(), device, "throughput")


def test_experts_have_a_width_of_their_own() -> None:
    """Qwen3 30B A3B: 30.5 billion parameters, of which 3.3 compute a token."""
    shape = {"num_hidden_layers": 48, "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4}
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "intermediate_size": 6144}
    model = shaped(**shape, **experts, head_dim=128, vocab_size=151936)
    assert memory_on(model, find_accelerator("H100"), 1, 8192).parameters == pytest.approx(30.5e9, rel=0.01)
    dense = replace(model, config={**model.config, "num_experts_per_tok": 128})
    one, all_of_them = (recommend(each, find_accelerator("H100"), "throughput") for each in (model, dense))
    assert one.max_num_batched_tokens > all_of_them.max_num_batched_tokens


def test_a_model_of_unknown_size_is_named_as_such() -> None:
    with pytest.raises(ConfigurationError, match="the size of the model is not known"):
        recommend(ModelShape("m", "m", {"model_type": "llama"}), find_accelerator("H100"), "latency")


def test_a_model_that_needs_bfloat16_is_not_recommended_without_it() -> None:
    with pytest.raises(ConfigurationError, match="not stable in float16, and T4 has no bfloat16"):
        recommend(find_model("gemma-2-9b"), find_accelerator("T4"), "latency")


def test_a_model_that_does_not_fit_has_no_recommendation() -> None:
    """70B in 16 bits are 141 GB: more than 8 x 15 GiB, and than 90 % of one H200."""
    with pytest.raises(ConfigurationError, match="does not fit on 8 x T4 with 15 GiB"):
        recommend(find_model("llama-3.1-70b"), find_accelerator("t4"), "latency")
    assert for_degree(find_model("llama-3.1-70b"), find_accelerator("H200"), 1, "throughput") is None


def test_more_memory_and_the_other_goal_change_what_they_should() -> None:
    model = find_model("meta-llama/Llama-3.1-8B-Instruct")
    quick = recommend(model, find_accelerator("A10G"), "latency")
    many = recommend(model, find_accelerator("A10G"), "throughput")
    large = recommend(model, find_accelerator("H200"), "throughput")
    assert (quick.workers, many.workers, large.workers) == (2, 1, 1)
    assert large.max_num_seqs > many.max_num_seqs
    assert large.max_num_batched_tokens > many.max_num_batched_tokens >= quick.max_num_batched_tokens
    for found in (quick, many, large):
        assert found.target_ongoing_requests == round(0.4 * found.max_num_seqs)


def test_the_samples_are_what_the_command_writes(tmp_path: Path) -> None:
    samples = {path.name: path.read_text(encoding="utf-8") for path in (SAMPLES / "ray").iterdir()}
    ran = run_command("ray", "model-files", str(tmp_path), *samples, env=dict(os.environ), cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    written = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    assert written == samples, "run: lmi-server ray model-files serving.properties.d/ray"
    assert {name.split("_")[0] for name in samples} == set(FAMILIES)
    assert len({name.split("_")[1] for name in samples}) == len(samples)


def test_there_is_a_file_for_each_model_accelerator_and_number_of_devices_that_fit(tmp_path: Path) -> None:
    written = {path.name for path in write_files(tmp_path / "all", ())}
    assert written == {path.name for path in (tmp_path / "all").iterdir()}
    assert len(written) == 170
    assert {name.split("_")[0] for name in written} == set(FAMILIES)
    assert {name.split("_")[1] for name in written} == {name.lower() for name in ACCELERATORS}
    assert "gemma-2-9b_t4_tp2.yaml" not in written
    with pytest.raises(ConfigurationError, match=r'"gemma-2-9b_t4_tp2\.yaml" is no recommended model file'):
        write_files(tmp_path, ["gemma-2-9b_t4_tp2.yaml"])


@pytest.mark.slow
@pytest.mark.parametrize("command", [["check"], ["ray", "explain"]])
def test_a_file_that_is_not_there_has_a_command_that_writes_it(tmp_path: Path, command: list[str]) -> None:
    def run(*arguments: str) -> tuple[int, str]:
        ran = run_command(*arguments, env=dict(os.environ), cwd=tmp_path)
        return ran.returncode, ran.stdout + ran.stderr

    code, printed = run(*command, "share/ray/mistral-7b_l4_tp1.yaml")
    advice = re.search(r"; lmi-server (ray model-files \S*share/ray mistral-7b_l4_tp1.yaml) writes", printed)
    assert code == 1
    assert advice is not None, printed
    assert run(*advice[1].split())[0] == 0
    assert "there is no such" not in run(*command, "share/ray/mistral-7b_l4_tp1.yaml")[1]
    assert "ray model-files" not in run(*command, "share/ray/other.yaml")[1]


def test_the_samples_are_model_files() -> None:
    pytest.importorskip("yaml")
    from lmi_server.configuration.model_file.read import read_model_file

    for name in ("llama-3.1-8b_t4_tp2.yaml", "mixtral-8x7b_inf2_tp8.yaml", "gemma-2-9b_mi300x_tp1.yaml"):
        found = read_model_file(SAMPLES / "ray" / name)
        assert not found.warnings
        assert found.given["option.tensor_parallel_degree"].raw == name[-6]


@pytest.mark.parametrize(("family", "accelerator"), [("qwen3-8b", "L4"), ("mistral-7b", "A10G"), ("phi-4", "H100")])
def test_what_is_printed_is_a_serving_properties_on_one_device_where_one_is_enough(
    tmp_path: Path, family: str, accelerator: str
) -> None:
    variables = dict(os.environ)
    ran = run_command("recommend", family, "--accelerator", accelerator, env=variables, cwd=tmp_path)
    assert "option.tensor_parallel_degree=1\n" in ran.stdout
    (tmp_path / "serving.properties").write_text(ran.stdout)
    found = inspect_model(tmp_path, {})
    assert (found.problems, [warning for warning in found.warnings if "unknown key" in warning]) == ((), [])
    assert found.spec.title == "vllm"


def test_without_an_accelerator_it_is_that_of_this_machine(tmp_path: Path) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho NVIDIA A100-SXM4-80GB\necho NVIDIA A100-SXM4-80GB\n")
    tool.chmod(0o755)
    variables = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    ran = run_command("recommend", "llama-3.3-70b", env=variables, cwd=tmp_path)
    assert "2 x A100-80G" in (ran.stdout + ran.stderr)
    tool.write_text("#!/bin/sh\necho GeForce\n")
    ran = run_command("recommend", "qwen3-8b", env=variables, cwd=tmp_path)
    assert (ran.returncode, "this machine has GeForce, for which there are no figures" in ran.stderr) == (1, True)


@pytest.mark.parametrize(
    ("product", "name"),
    [
        *(("Tesla T4", "T4"), ("NVIDIA L4", "L4"), ("NVIDIA A10G", "A10G"), ("NVIDIA H100 80GB HBM3", "H100")),
        *(("NVIDIA A100-SXM4-40GB", "A100-40G"), ("NVIDIA A100 80GB PCIe", "A100-80G"), ("NVIDIA L40S", None)),
    ],
)
def test_products_are_accelerators(product: str, name: str | None) -> None:
    found = accelerator_of(product)
    assert (None if found is None else found.name) == name


def test_the_command_takes_a_directory_and_a_family(tmp_path: Path) -> None:
    def run(*arguments: str) -> tuple[int, str]:
        ran = run_command("recommend", *arguments, env=dict(os.environ), cwd=tmp_path)
        return ran.returncode, ran.stdout + ran.stderr

    config = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 512, "dtype": "float32"}))
    code, printed = run(".", "--accelerator", "L4", "--throughput")
    assert code == 0
    assert {"option.tensor_parallel_degree=1", "option.max_model_len=512"} <= set(printed.splitlines())
    assert "option.max_rolling_batch_size=512" in printed.splitlines()
    code, printed = run("mistral-7b", "--accelerator", "a10g", "--file")
    assert (code, "num_workers: 2" in printed, "accelerator_type:A10G" in printed) == (0, True, True)
    assert run("nothing", "--accelerator", "L4")[0] == 1
    code, printed = run("mistral-7b", "--accelerator", "K80")
    assert (code, "allowed: T4, L4, A10G" in printed) == (1, True)
