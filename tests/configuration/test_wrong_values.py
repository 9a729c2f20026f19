"""A wrong value of any declared key gives one line with file, line, key, value and what is allowed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lmi_server.configuration.declaration import Option
from lmi_server.configuration.handlers import (
    DEEPSPEED_TASK,
    HANDLERS,
    JAVA_ENGINE,
    PIPELINE,
    VLLM_POOLING,
    HandlerRow,
    load_options_type,
)
from lmi_server.configuration.options import ServingOptions
from lmi_server.configuration.resolve import inspect_model
from lmi_server.machine.inventory import Machine

MACHINE = Machine(total_bytes=2**34, available_bytes=2**33)
WRONG = "no such value!"
# They decide which handler is meant, and are tested with it.
DECIDING = ("engine", "option.entryPoint")
_OTHERWISE = {
    JAVA_ENGINE.title: "engine=PyTorch",
    PIPELINE.title: "option.task=fill-mask",
    DEEPSPEED_TASK.title: "option.entryPoint=deepspeed",
    VLLM_POOLING.title: "option.entryPoint=vllm\noption.task=text-embedding",
}


def typed(options: tuple[Option, ...]) -> list[Option]:
    """Return the options that do not take just any text."""
    return [option for option in options if option.allowed not in ("a text", "names separated by commas")]


def cases() -> list[tuple[HandlerRow, Option]]:
    shared = [(HANDLERS[0], option) for option in typed(ServingOptions.declared())]
    own = [(row, option) for row in (*HANDLERS, JAVA_ENGINE) for option in typed(load_options_type(row).declared())]
    return [(row, option) for row, option in (*shared, *own) if option.key not in DECIDING]


@pytest.mark.parametrize("spelling", ["first", "last"])
@pytest.mark.parametrize(("row", "option"), cases(), ids=lambda case: getattr(case, "key", None) or case.title)
def test_a_wrong_value(row: HandlerRow, option: Option, spelling: str, tmp_path: Path) -> None:
    key = option.keys[0 if spelling == "first" else -1]
    decide = f"option.entryPoint={row.names[0]}" if row.names else _OTHERWISE[row.title]
    file = tmp_path / "serving.properties"
    file.write_text("\n".join([*f"{decide}\n".split("\n")[:2], f"{key}={WRONG}"]))
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    (problem,) = inspect_model(tmp_path, {}, machine=MACHINE).problems
    assert problem == f'{file}:3: {key} = "{WRONG}" is not allowed; allowed: {option.allowed}'


@pytest.mark.parametrize("key", DECIDING)
def test_a_wrong_handler(key: str, tmp_path: Path) -> None:
    file = tmp_path / "serving.properties"
    file.write_text(f"\n{key}={WRONG}\n")
    (tmp_path / "config.json").write_text("{}")
    (problem,) = inspect_model(tmp_path, {}, machine=MACHINE).problems
    assert problem.startswith(f'{file}:2: {key} = "{WRONG}" is not allowed; allowed: ')
