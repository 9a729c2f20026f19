"""Every row of LMI's document of configurations: each value is honoured, or a warning or a refusal says what to do.

`tests/data/documented_rows.json` says it for each row. A row, or a value of a row, without an entry fails.
"""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from paths import DATA, ROOT

from lmi_server.configuration.resolve import inspect_model
from lmi_server.machine.device_tools import Gpu
from lmi_server.machine.inventory import Machine

ROWS: dict[str, dict[str, dict[str, str]]] = json.loads((DATA / "documented_rows.json").read_text())
KEYS: list[dict[str, Any]] = json.loads((DATA / "documented_keys.json").read_text())["tables"]
DOCUMENT = ROOT.parent / "shared/seeds/lmi-configurations.md"
ENGINES = frozenset({"transformers", "torch", "vllm", "deepspeed", "tensorrt_llm", "optimum.neuron"})
MACHINE = Machine(2**36, 2**35, cores=4, engines=ENGINES)
MACHINES = {
    "TensorRT-LLM": Machine(2**36, 2**35, gpus=(Gpu("0"),), engines=ENGINES),
    "Transformers-NeuronX": Machine(2**36, 2**35, neuron_devices=1, neuron_cores=(Gpu("0"),), engines=ENGINES),
}
# What the document says a section is for.
CHOSEN_BY = {
    "Common": "engine=Python",
    "DeepSpeed": "engine=DeepSpeed",
    "HuggingFace Accelerate": "engine=Python\noption.rolling_batch=scheduler",
    "LMI-Dist": "engine=MPI\noption.rolling_batch=lmi-dist",
    "vLLM": "engine=Python\noption.rolling_batch=vllm",
    "Transformers-NeuronX": "option.entryPoint=djl_python.transformers_neuronx",
    "TensorRT-LLM": "engine=MPI\noption.rolling_batch=trtllm",
}
# What a value needs beside it, by key.
TOGETHER = {
    "option.rotary_scaling_type": "option.rotary_scaling_factor=2.0",
    "option.rotary_scaling_factor": "option.rotary_scaling_type=linear",
    "option.smoothquant_alpha": "option.quantize=smoothquant",
    "option.smoothquant_per_token": "option.quantize=smoothquant",
    "option.smoothquant_per_channel": "option.quantize=smoothquant",
    "option.multi_query_mode": "option.quantize=smoothquant",
    "option.awq_format": "option.quantize=awq",
    "option.awq_calib_size": "option.quantize=awq",
    "option.batch_size": "option.rolling_batch=disable",
    "option.checkpoint": "option.rolling_batch=deepspeed",
    "option.context_length_estimate": "option.n_positions=2048",
}


_ON_GPU = Machine(2**36, 2**35, gpus=(Gpu("0"),), engines=ENGINES)
_TRTLLM = f"{CHOSEN_BY['TensorRT-LLM']}\noption.backend=tensorrt"
_TNX = f"{CHOSEN_BY['Transformers-NeuronX']}\noption.model_loader=tnx"
_SCHEDULER = "engine=Python\noption.rolling_batch=scheduler"
# The rows that are refused or warned about, as the message says to write them: section, what chooses the handler, the
# line, the machine. The tests of each handler serve with these.
REMEDIES: tuple[tuple[str, str, str, Machine | None], ...] = (
    ("Common", "engine=MPI", "option.entryPoint=djl_python.deepspeed", None),
    ("Common", "engine=Python\noption.rolling_batch=disable", "batch_size=1", None),
    ("DeepSpeed", "engine=MPI\noption.rolling_batch=deepspeed", "option.enable_cuda_graph=true", None),
    ("DeepSpeed", "engine=DeepSpeed", "option.triangular_masking=true", _ON_GPU),
    ("DeepSpeed", "engine=DeepSpeed", "option.return_tuple=true", _ON_GPU),
    ("DeepSpeed", "engine=DeepSpeed", "option.training_mp_size=1", _ON_GPU),
    ("HuggingFace Accelerate", _SCHEDULER, "option.decoding_strategy=greedy", None),
    ("HuggingFace Accelerate", _SCHEDULER, "option.decoding_strategy=sample", None),
    ("HuggingFace Accelerate", _SCHEDULER, "option.quantize=bitsandbytes4", None),
    ("HuggingFace Accelerate", _SCHEDULER, "option.quantize=bitsandbytes8", None),
    ("LMI-Dist", "engine=MPI\noption.rolling_batch=scheduler", "option.quantize=bitsandbytes8", None),
    ("Transformers-NeuronX", _TNX, "option.unroll=2", None),
    ("Transformers-NeuronX", _TNX, "option.neuron_optimize_level=1", None),
    ("Transformers-NeuronX", _TNX, "option.low_cpu_mem_usage=False", None),
    ("Transformers-NeuronX", _TNX, "option.group_query_attention=shard-over-heads", None),
    ("Transformers-NeuronX", _TNX, "option.enable_mixed_precision_accumulation=true", None),
    ("TensorRT-LLM", _TRTLLM, "option.multi_block_mode=true", None),
    ("TensorRT-LLM", _TRTLLM, "option.use_fused_mlp=true", None),
)


def outcome(
    section: str, line: str, directory: Path, chosen_by: str | None = None, machine: Machine | None = None
) -> str:
    """Return "honoured", or what the first warning or refusal says of the key of `line`."""
    key = line.partition("=")[0]
    (directory / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}')
    manifest = {"type": "BLOOM", "checkpoints": ["weights.bin"], "version": 1.0}
    (directory / "ds_inference_checkpoint.json").write_text(json.dumps(manifest))
    (directory / "weights.bin").touch()
    chosen = [text for text in (chosen_by or CHOSEN_BY[section]).splitlines() if text.partition("=")[0] != key]
    lines = [*chosen, line, TOGETHER.get(key, "")]
    (directory / "serving.properties").write_text("\n".join(lines))
    found = inspect_model(directory, {}, machine=machine or MACHINES.get(section, MACHINE))
    refused = [*found.problems, *found.unavailable]
    if refused:
        return f"refused: {_without_place(refused[0], directory)}"
    said = [text for text in found.warnings if key in text or "8 bits" in text]
    return f"warned: {_without_place(said[0], directory)}" if said else "honoured"


def _without_place(text: str, directory: Path) -> str:
    return re.sub(r"serving\.properties:\d+: ", "", text.replace(f"{directory}/", "").replace(str(directory), "DIR"))


@pytest.mark.parametrize("section", CHOSEN_BY)
def test_each_row_is_honoured_or_refused_as_the_table_says(section: str, tmp_path: Path) -> None:
    if section in ("LMI-Dist", "vLLM") and find_spec("vllm") is None:
        pytest.skip("the source of vLLM says what it has")
    wrong = []
    for key, values in ROWS[section].items():
        for value, expected in values.items():
            found = outcome(section, f"{key}={value}", tmp_path)
            if found != expected:
                wrong.append(f"{key}={value}: {found!r}, not {expected!r}")
    assert wrong == []


@pytest.mark.parametrize(("section", "chosen_by", "line", "machine"), REMEDIES)
def test_what_a_message_says_to_write_is_honoured(
    section: str, chosen_by: str, line: str, machine: Machine | None, tmp_path: Path
) -> None:
    assert outcome(section, line, tmp_path, chosen_by, machine) == "honoured"


def test_a_pipeline_of_images_is_served_as_the_messages_say(tmp_path: Path) -> None:
    """tests/engines/stable_diffusion serves one with these lines."""
    pipeline = tmp_path / "pipeline"
    pipeline.mkdir()
    (pipeline / "model_index.json").write_text('{"_class_name": "StableDiffusionPipeline"}')
    chosen_by = f"engine=Python\noption.model_id={pipeline}"
    assert outcome("Common", "option.entryPoint=djl_python.stable_diffusion", tmp_path, chosen_by) == "honoured"


def test_each_refusal_and_each_warning_says_what_to_do() -> None:
    """A warning may also say that nothing is lost: what the key asks for happens anyway."""
    remedies = re.compile(r"\b(use|set|remove|install|name|allowed:|no effect|deprecated|says so|not available)\b")
    said = [text for rows in ROWS.values() for values in rows.values() for text in values.values()]
    assert [text for text in said if text != "honoured" and remedies.search(text) is None] == []


def test_every_documented_value_is_in_the_table() -> None:
    missing = [
        f"{row['section']}: {row['key']}={value}"
        for row in KEYS
        for value in row["allowed"] or [None]
        if (value or next(iter(ROWS[row["section"]].get(row["key"], {})), None))
        not in ROWS[row["section"]].get(row["key"], {})
    ]
    assert missing == []


@pytest.mark.skipif(not DOCUMENT.is_file(), reason="LMI's document is not beside the checkout")
def test_every_row_of_the_document_is_in_the_table() -> None:
    section, missing = "", []
    for line in DOCUMENT.read_text(encoding="utf-8").splitlines():
        if line.startswith("### "):
            section = re.sub(r"\s*\(\[doc.*", "", line.removeprefix("### ")).strip()
        cells = [cell.strip() for cell in line.split("|")]
        names = re.findall(r"(?:option\.\w+|^\w+)", cells[1]) if len(cells) > 3 and section in ROWS else []
        names = [name for name in names if name.startswith("option.") or name in ("engine", "job_queue_size")]
        missing += [f"{section}: {name}" for name in names if name not in ROWS[section]]
    assert missing == []
