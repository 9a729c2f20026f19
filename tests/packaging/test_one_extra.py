"""Each extra serves its sample in an environment with nothing else: nothing that it needs is missing from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fresh_environments import SharedEnvironment
from paths import SAMPLES
from product_helpers import Server, running
from skops_helpers import import_skops

pytestmark = pytest.mark.slow

TEXT = {"inputs": "a b", "parameters": {"max_new_tokens": 4}}
ROW = {"inputs": [[0.1, 0.2, 0.3, 0.4]]}


@dataclass(frozen=True)
class Case:
    """`extras` and the sample that they are for; `make` writes a small model into the directory that it is given.

    `changes` are keys in the place of the sample's own. Text is generated in float16, where no CPU kernel is compiled.
    """

    extras: tuple[str, ...]
    sample: str
    make: Callable[[Path], None]
    request: Any = field(default_factory=lambda: TEXT)
    changes: tuple[tuple[str, str], ...] = (("option.dtype", "fp16"),)


def llama(directory: Path) -> None:
    from tiny_models import llama_of_whole_blocks, saved_model

    model = llama_of_whole_blocks()
    model.resize_token_embeddings(260)  # two ranks share the vocabulary
    saved_model(model, directory)


def llama_for_vllm(directory: Path) -> None:
    from vllm_helpers import make_tiny_model

    make_tiny_model(directory)


def classifier(directory: Path) -> None:
    from tiny_tasks import make_task_model

    make_task_model("text-classification", directory)


def forest(directory: Path) -> None:
    from sklearn.ensemble import RandomForestClassifier

    rows = [[float(index % 3), 1.0, 2.0, 3.0] for index in range(12)]
    directory.mkdir()
    import_skops().dump(RandomForestClassifier(n_estimators=2).fit(rows, [0, 1] * 6), directory / "model.skops")


def booster(directory: Path) -> None:
    import numpy as np
    import xgboost

    directory.mkdir()
    data = xgboost.DMatrix(np.eye(4), np.arange(4.0))
    xgboost.train({}, data, num_boost_round=2).save_model(directory / "model.json")


SMALL = (("option.max_model_len", "128"), ("option.kv_cache_memory_gb", "1"), ("option.dtype", "fp16"))
# The last test of test_installed.py leaves the packages of huggingface. In this order few are taken out again.
CASES = {
    "huggingface": Case(("huggingface",), "huggingface", llama, changes=SMALL),
    "tasks": Case(("huggingface", "tasks"), "dynamic-batching", classifier, {"inputs": "the fox"}, ()),
    "mpi": Case(("huggingface", "mpi"), "huggingface-mpi", llama),
    "bitsandbytes": Case(("huggingface", "bitsandbytes"), "huggingface-bitsandbytes", llama),
    "deepspeed": Case(("deepspeed", "huggingface", "mpi"), "deepspeed-task", classifier, {"inputs": "the fox"}, ()),
    "vllm": Case(
        ("vllm",),
        "vllm",
        llama_for_vllm,
        changes=(*SMALL[:2], ("option.dtype", "fp32"), ("option.enforce_eager", "true")),
    ),
    "sklearn": Case(("sklearn",), "sklearn", forest, ROW, ()),
    "xgboost": Case(("xgboost",), "xgboost", booster, ROW, ()),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_an_extra_serves_its_sample(case: Case, shared_environment: SharedEnvironment, tmp_path: Path) -> None:
    commands = shared_environment.with_extras(*case.extras)
    model = tmp_path / "model"
    case.make(model)
    sample = (SAMPLES / f"{case.sample}.properties").read_text()
    changes = {**dict(case.changes), **({"option.model_id": str(model)} if "option.model_id" in sample else {})}
    lines = [line for line in sample.splitlines() if line.partition("=")[0] not in changes]
    (model / "serving.properties").write_text(
        "\n".join([*lines, *(f"{key}={value}" for key, value in changes.items())])
    )
    variables = {**shared_environment.variables, "VLLM_CPU_KVCACHE_SPACE": "1"}
    with running(Server(model, commands, variables)) as server:
        answer = server.http.post("/invocations", json=case.request)
        assert answer.status_code == 200, answer.text
