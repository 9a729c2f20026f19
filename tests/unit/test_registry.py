"""Models on a machine whose free memory the test decides; their workers start with the first request."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import NoReturn

import msgspec
import pytest
from model_directories import write_properties
from relay_helpers import on_loop

from lmi_server.artifacts.fetch import artifact_settings
from lmi_server.configuration.resolve import inspect_model
from lmi_server.contract.errors import ConfigurationError, ModelMemoryError
from lmi_server.contract.protocol import Input
from lmi_server.machine.inventory import Machine
from lmi_server.serving.models import model_memory
from lmi_server.serving.models.model_store import ModelSource
from lmi_server.serving.models.registry import ModelRegistry

MIB = 2**20


def make_model(directory: Path, required_mb: int) -> ModelSource:
    write_properties(directory, entryPoint="echo", required_memory_mb=required_mb, reserved_memory_mb=0, minWorkers=0)
    return ModelSource(str(directory), directory.name)


async def ask(models: ModelRegistry, name: str) -> None:
    body = msgspec.json.encode({"inputs": "a"})
    job = models.find(name).loaded().submit(Input("invocations", {}, [("data", body)]), on_overflow=lambda: None)
    while job.reply.terminal is None:
        await job.reply.wait()


@on_loop
async def test_idle_models_make_room_if_the_settings_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = ModelRegistry({}, artifact_settings(tmp_path / "downloads", {}), inspect_model, drain_timeout_s=0.0)
    monkeypatch.setattr(
        model_memory, "this_machine", lambda _: Machine(2000 * MIB, (1000 - 300 * loaded_models(models)) * MIB)
    )
    try:
        for name in "abc":
            await models.register_and_load(make_model(tmp_path / name, 300))
        wanting = make_model(tmp_path / "d", 300)
        with pytest.raises(ModelMemoryError, match=r"required_memory_mb: .* 300 MiB are needed, 100 are free"):
            await models.register_and_load(wanting)
        assert models.names == ["a", "b", "c"]
        models.room.unloads_idle = True
        await ask(models, "a")
        await models.register_and_load(wanting)
        assert models.names == ["a", "c", "d"], "b had no request for longest"
        with pytest.raises(ModelMemoryError, match="1100 MiB are needed"):
            await models.register_and_load(make_model(tmp_path / "large", 1100))
        assert models.names == ["a", "c", "d"], "nothing is unloaded in vain"
        await models.register_and_load(make_model(tmp_path / "most", 700))
        assert models.names == ["d", "most"]
    finally:
        await models.stop()


class Lease:
    """Stands for the lease of an environment."""


@pytest.mark.slow
@on_loop
async def test_a_failed_model_keeps_nothing_of_its_load(tmp_path: Path) -> None:
    held: list[weakref.ref[Lease]] = []

    def inspect(*_: object) -> NoReturn:
        lease = Lease()
        held.append(weakref.ref(lease))
        raise ConfigurationError("x is wrong")

    models = ModelRegistry({}, artifact_settings(tmp_path / "downloads", {}), inspect, drain_timeout_s=0.0)
    model = models.register(make_model(tmp_path / "a", 1))
    try:
        await model.settled.wait()
        gc.collect()
        assert isinstance(model.failure, ConfigurationError)
        assert [lease() for lease in held] == [None]
    finally:
        await models.stop()


def loaded_models(models: ModelRegistry) -> int:
    return sum(model.pool is not None for model in models.models)
