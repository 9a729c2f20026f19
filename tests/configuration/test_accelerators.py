"""What `lmi-server check` says of models for accelerators: served, or the package and the device that are missing."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from paths import DATA, SAMPLES

from lmi_server.configuration.declaration import Option
from lmi_server.configuration.handlers import HANDLERS, HandlerSpec, load_options_type
from lmi_server.configuration.resolve import Inspection, inspect_model
from lmi_server.explain.explanation import explain
from lmi_server.machine.inventory import Gpu, Machine

BARE = Machine(2**34, 2**33)
GPUS = Machine(
    2**38,
    2**37,
    gpus=(Gpu("0", 2**36), Gpu("1", 2**36)),
    engines=frozenset({"tensorrt_llm", "diffusers", "torch", "transformers"}),
)
NEURON = Machine(
    2**38,
    2**37,
    neuron_devices=1,
    neuron_cores=tuple(Gpu(str(core), 2**34) for core in range(8)),
    engines=frozenset({"transformers_neuronx", "optimum.neuron", "vllm", "vllm_neuron"}),
)
# By the title of the handler, a machine that has what it needs.
EQUIPPED = {
    "tensorrt_llm": GPUS,
    "transformers_neuronx": NEURON,
    "vllm on Neuron": NEURON,
    "stable_diffusion": GPUS,
    "stable_diffusion on Neuron": NEURON,
}
FILES = sorted(
    path
    for path in SAMPLES.glob("*.properties")
    if path.stem.startswith(
        ("tensorrt_llm", "transformers_neuronx", "optimum_neuron", "vllm-neuron", "stable_diffusion")
    )
)
SECTIONS = {"TensorRT-LLM": "tensorrt_llm", "Transformers-NeuronX": "transformers_neuronx"}
DEVICES = {"gpu": "an NVIDIA GPU", "nc": "a Neuron device"}
# Keys that count only beside another one.
TOGETHER = {
    "option.rotary_scaling_type": "option.rotary_scaling_factor=2.0",
    "option.rotary_scaling_factor": "option.rotary_scaling_type=linear",
    "option.qkv_tiling": "option.fuse_qkv=true",
    "option.context_length_estimate": "option.n_positions=1024",
    "option.partition_schema": "option.model_loader=tnx",
}


def written(directory: Path, *lines: str) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "serving.properties").write_text("\n".join(lines))
    return directory


def missing(found: Inspection) -> set[str]:
    """Return the lines of a machine without packages and devices."""
    spec, engine = found.spec, found.engine
    device = (
        f"{spec.title} needs {DEVICES.get(spec.device)}, and none is visible; serve the model on a machine with one"
    )
    return ({device} if spec.device else set()) | {
        f"{spec.title} needs the Python package {package}, which is not installed; run: {engine.install_command}"
        for package in engine.packages
    }


def check(found: Inspection) -> tuple[str, ...]:
    explanation = explain(found)
    assert explanation.can_be_served == (not explanation.unavailable)
    return tuple(explanation.unavailable)


@pytest.mark.parametrize("sample", FILES, ids=lambda sample: sample.stem)
def test_a_sample_is_served_or_names_what_is_missing(sample: Path, tmp_path: Path) -> None:
    written(tmp_path, sample.read_text(encoding="utf-8"))
    bare = inspect_model(tmp_path, {}, machine=BARE)
    needed = missing(bare)
    assert len(needed) >= 2  # packages, and the device but for images
    assert all("; run: pip install" in line or "serve the model on a machine" in line for line in needed)
    assert set(check(bare)) == needed
    assert check(inspect_model(tmp_path, {}, machine=EQUIPPED[bare.spec.title])) == ()


def test_the_memory_is_that_of_the_requests_that_the_engine_takes(tmp_path: Path) -> None:
    """Not that of option.max_rolling_batch_size, which is 32 here."""
    compiled = ["option.entryPoint=neuronx", "option.n_positions=512", "option.max_rolling_batch_size=32"]
    for number, lines, tokens in (
        (0, compiled, 512),  # without the rolling batch the graphs have one line
        (1, [*compiled, "option.rolling_batch=auto"], 32 * 512),
        (2, ["option.entryPoint=tensorrt_llm", "option.max_seq_len=512", "option.max_num_sequences=12"], 12 * 512),
    ):
        memory = explain(inspect_model(written(tmp_path / str(number), *lines), {}, machine=BARE)).memory
        assert memory["kv_tokens"] == tokens, lines


def candidates(option: Option, directory: Path) -> Iterator[str]:
    """Yield texts, one of which the key takes."""
    yield from re.split(r", | \(", option.allowed)
    yield from ("1", "0.5", "2.0", "fp8", "true", "1,2", '{"a": 1}', str(directory), "text")


@pytest.mark.parametrize(
    "section", [pytest.param(name, marks=[pytest.mark.slow] if name == "TensorRT-LLM" else []) for name in SECTIONS]
)
def test_a_key_is_served_or_names_what_is_missing(section: str, tmp_path: Path) -> None:
    """Each documented key, with each documented value; of the other keys one value that they take."""
    documented = json.loads((DATA / "documented_keys.json").read_text())
    spec = HANDLERS.by_title(SECTIONS[section])
    rows = [row for row in documented["tables"] if row["section"] == section]
    further = [f"option.{name}" for name in documented["further options"][spec.title]]
    declared = {key: option for option in load_options_type(spec).declared_options() for key in option.keys}
    wrong = []
    for key in dict.fromkeys([*(row["key"] for row in rows), *further]):
        values = [raw for row in rows if row["key"] == key for raw in row["allowed"]]
        taken = values or [_taken(declared[key], spec, tmp_path)]
        wrong += [f"{key}={raw}" for raw in taken if not _is_served_or_named(spec, f"{key}={raw}", tmp_path)]
    assert wrong == []


def _lines(spec: HandlerSpec, line: str) -> list[str]:
    key = line.partition("=")[0]
    return [f"option.entryPoint={spec.entry_points[0]}", "option.model_id=owner/name", line, TOGETHER.get(key, "")]


def _taken(option: Option, spec: HandlerSpec, directory: Path) -> str:
    def problems(raw: str) -> tuple[str, ...]:
        return inspect_model(written(directory, *_lines(spec, f"{option.key}={raw}")), {}, machine=BARE).problems

    return next(raw for raw in candidates(option, directory) if not problems(raw))


def _is_served_or_named(spec: HandlerSpec, line: str, directory: Path) -> bool:
    """Return whether `check` finds nothing but the missing package and device, and the key itself if it is refused."""
    written(directory, *_lines(spec, line))
    bare = inspect_model(directory, {}, machine=BARE)
    needed = missing(bare)
    equipped = check(inspect_model(directory, {}, machine=EQUIPPED[bare.spec.title]))
    refused = all(line.partition("=")[0] in text for text in equipped)
    return refused and set(check(bare)) == needed.union(equipped) and bare.problems == ()
