"""A new engine is a folder and one `HandlerSpec`: nothing else names it, and it resolves, explains and serves."""

from __future__ import annotations

import dataclasses
import os
from functools import partial
from pathlib import Path

import msgspec
import pytest
from paths import ROOT
from relay_helpers import on_loop

from lmi_server.artifacts.fetch import artifact_settings
from lmi_server.configuration.handlers import HANDLERS, HandlerSpec, HandlerTable, Variant
from lmi_server.configuration.resolve import inspect_model
from lmi_server.contract.protocol import Input, Reply
from lmi_server.explain.explanation import explain
from lmi_server.machine.inventory import Machine
from lmi_server.serving.models.model_store import ModelSource
from lmi_server.serving.models.registry import ModelRegistry

OPTIONS = """
from typing import Literal
from pydantic import Field
from lmi_server.configuration.options import ModelOptions, Names, PositiveInt


class TinyOptions(ModelOptions):
    rolling_batch: Literal["auto", "tiny"] = Field("auto", description="The engine batches by itself.")
    repeats: PositiveInt = Field(1, description="Times that a word is said.")
    words: Names = Field(("hello",), description="Words to say.")


def says_nothing(workload):
    return workload.task == "silence"
"""
HANDLER = """
import itertools
from lmi_server.contract.generation import Delta, Token, Usage
from lmi_server.contract.handler import LLMHandler, ModelInfo


class TinyHandler(LLMHandler):
    async def start(self, model_dir, options):
        self._text = f" {options.words[0]}" * options.repeats + options.passed_through.get("ending", "")
        return ModelInfo(max_model_len=128)

    async def generate(self, request):
        yield Delta(self._text, (Token(1, self._text, 0.0),), "eos_token", Usage(1, 1))

    async def tokenize(self, request):
        return [1]
"""
TINY = HandlerSpec(
    title="tiny",
    handler="tiny_engine.handler:TinyHandler",
    options="tiny_engine.options:TinyOptions",
    entry_points=("tiny",),
    rolling_batches=("tiny",),
    model_files=("model.tiny",),
    variants=(Variant("echo", serves="tiny_engine.options:says_nothing"),),
    engines=("no_such_library",),
)
MACHINE = Machine(total_bytes=2**34, available_bytes=2**33)


@pytest.fixture
def handlers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HandlerTable:
    """Return the table with one more handler, whose folder is on the path of this process and of workers."""
    folder = tmp_path / "path" / "tiny_engine"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "options.py").write_text(OPTIONS)
    (folder / "handler.py").write_text(HANDLER)
    monkeypatch.syspath_prepend(folder.parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder.parent), str(ROOT)]))
    return dataclasses.replace(HANDLERS, specs=(*HANDLERS.specs, TINY))


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    return directory


@pytest.mark.parametrize("text", ["option.entryPoint=tiny", "option.rolling_batch=tiny"])
def test_a_configuration_means_it(text: str, model_dir: Path, handlers: HandlerTable) -> None:
    (model_dir / "serving.properties").write_text(text)
    found = inspect_model(model_dir, {}, machine=MACHINE, handlers=handlers)
    assert (found.spec, found.problems, found.unavailable) == (TINY, (), ())
    assert inspect_model(model_dir, {}, machine=MACHINE).spec is not TINY


def test_a_file_means_it(model_dir: Path, handlers: HandlerTable) -> None:
    (model_dir / "model.tiny").touch()
    assert inspect_model(model_dir, {}, machine=MACHINE, handlers=handlers).spec is TINY


def test_its_variant_serves_other_workloads(model_dir: Path, handlers: HandlerTable) -> None:
    (model_dir / "serving.properties").write_text("option.entryPoint=tiny\noption.task=silence")
    assert inspect_model(model_dir, {}, machine=MACHINE, handlers=handlers).spec.title == "echo"


def test_its_values_are_checked_and_explained(model_dir: Path, handlers: HandlerTable) -> None:
    file = model_dir / "serving.properties"
    file.write_text("option.entryPoint=tiny\noption.repeats=0\noption.repeat=2")
    found = explain(inspect_model(model_dir, {}, machine=MACHINE, handlers=handlers))
    assert found.handler == "tiny"
    assert found.problems == (f'{file}:2: option.repeats = "0" is not allowed; allowed: an integer of 1 or more',)
    assert f"{file}:3: unknown key option.repeat, it is ignored; did you mean option.repeats?" in found.warnings
    assert "tiny needs the Python package no_such_library, which is not installed" in found.unavailable
    assert handlers.engines() - HANDLERS.engines() == {"no_such_library"}


def test_a_key_of_it_has_no_effect_on_others(model_dir: Path, handlers: HandlerTable) -> None:
    file = model_dir / "serving.properties"
    file.write_text("option.entryPoint=echo\noption.repeats=2")
    (warning,) = inspect_model(model_dir, {}, machine=MACHINE, handlers=handlers).warnings
    assert warning == f"{file}:2: option.repeats has no effect on echo; it is an option of tiny"


@on_loop
async def test_it_serves(model_dir: Path, tmp_path: Path, handlers: HandlerTable) -> None:
    (model_dir / "serving.properties").write_text("option.entryPoint=tiny\noption.repeats=2\noption.ending=!")
    artifacts = artifact_settings(tmp_path / "downloads", {})
    models = ModelRegistry({}, artifacts, partial(inspect_model, handlers=handlers), drain_timeout_s=0.0)
    try:
        model = await models.register_and_load(ModelSource(str(model_dir), "model"))
        body = msgspec.json.encode({"inputs": "a"})
        job = model.loaded().submit(Input("invocations", {}, [("data", body)]), on_overflow=lambda: None)
        while job.reply.terminal is None:
            await job.reply.wait()
        assert isinstance(job.reply.terminal, Reply)
        assert msgspec.json.decode(job.reply.terminal.data)["generated_text"] == " hello hello!"
    finally:
        await models.stop()
