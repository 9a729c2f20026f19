"""The model files of Ray that the rule of `recommendation` gives: one per model, accelerator and number of devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from lmi_server.contract.errors import ConfigurationError
from lmi_server.files.whole_files import write_text
from lmi_server.ray.deployments.deployment import ACCELERATOR_SHARE
from lmi_server.ray.recommendation.accelerators import ACCELERATORS, FAMILIES, RayAccelerator
from lmi_server.ray.recommendation.recommendation import (
    DEGREES,
    UTILIZATION,
    ModelShape,
    Recommendation,
    find_model,
    for_degree,
)

_FILE = """\
# {model} on {workers} x {accelerator}, for low latency. Not measured: docs/ray-model-files.md has the rule.
deployment_config:
  autoscaling_config:
    min_replicas: 1
    initial_replicas: 1
    max_replicas: 8
    target_ongoing_requests: {target}
    look_back_period_s: 30.0
    upscale_delay_s: 15.0
    downscale_delay_s: 300.0
  max_ongoing_requests: {seqs}
engine_config:
  model_id: {model}
  type: VLLMEngine
  engine_kwargs:
    dtype: {dtype}
    gpu_memory_utilization: {utilization}
    max_num_seqs: {seqs}
    max_num_batched_tokens: {batched}
  max_total_tokens: {context}
scaling_config:
  num_workers: {workers}
  num_gpus_per_worker: {gpus}
  num_cpus_per_worker: 4
  placement_strategy: STRICT_PACK
  resources_per_worker: {resources}
"""


def model_file(model: ModelShape, accelerator: RayAccelerator, found: Recommendation) -> str:
    """Return RayLLM's file for the recommendation."""
    on_gpu = accelerator.resource == "GPU"
    named = f'"accelerator_type:{accelerator.ray_type}": {ACCELERATOR_SHARE}'
    counted = "" if on_gpu else f"{accelerator.resource}: 1, "
    return _FILE.format(
        model=model.id,
        accelerator=accelerator.name,
        workers=found.workers,
        target=found.target_ongoing_requests,
        seqs=found.max_num_seqs,
        batched=found.max_num_batched_tokens,
        context=found.max_model_len,
        dtype=accelerator.dtype,
        utilization=UTILIZATION,
        gpus=1 if on_gpu else 0,
        resources=f"{{{counted}{named}}}",
    )


def recommended_files() -> Mapping[str, str]:
    """Return the text of each file by name, for all combinations in which the model fits."""
    return {
        f"{family}_{accelerator.name.lower()}_tp{degree}.yaml": model_file(model, accelerator, found)
        for family in FAMILIES
        for model in [find_model(family)]
        for accelerator in ACCELERATORS.values()
        for degree in DEGREES
        if (found := for_degree(model, accelerator, degree, "latency"))
    }


def write_files(folder: Path, names: Sequence[str]) -> list[Path]:
    """Write the files with these names, all without names; return their paths.

    Raises ConfigurationError if a name is unknown or a file cannot be written.
    """
    files = recommended_files()
    for name in names:
        if name not in files:
            raise ConfigurationError(
                f'"{name}" is no recommended model file; allowed: MODEL_ACCELERATOR_tpDEVICES.yaml, such as'
                f" {next(iter(files))}, for a model and devices on which it fits"
            )
    paths = [folder / name for name in names or files]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"{folder}: {error}") from error
    for path in paths:
        write_text(path, files[path.name])
    return paths
