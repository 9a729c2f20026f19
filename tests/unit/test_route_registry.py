"""Which models a router has: those of its servers, up to a number."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from relay_helpers import on_loop

from lmi_server.artifacts.fetch import artifact_settings
from lmi_server.configuration.resolve import inspect_model
from lmi_server.contract.errors import BadParameterError, ModelNotReadyError
from lmi_server.route import registry
from lmi_server.route.connection import Peer
from lmi_server.route.fleet import Fleet, Server
from lmi_server.route.limits import Accounts
from lmi_server.route.pool import RouteSettings
from lmi_server.route.registry import RouteRegistry


@on_loop
async def test_models_beyond_the_bound_are_one_line_of_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(registry, "_MAX_MODELS", 3)
    fleet = Fleet(["http://models.example:8000"], None, 1.0)
    server = Server(fleet._places[0].site, Peer("10.0.0.1", 8000))
    fleet.servers["", server.peer] = server
    server.models = {f"model-{number}": frozenset() for number in range(50)}
    settings = RouteSettings(paths={}, max_in_flight=1, queue_size=1, timeout_s=1.0)
    models = RouteRegistry(
        settings, fleet, Accounts(), lambda: None, {}, artifact_settings(tmp_path, {}), inspect_model, 0.0
    )
    with pytest.raises(ModelNotReadyError, match="does not know the models of its servers yet"):
        models.refuse_if_untold()
    models.update()
    with pytest.raises(ModelNotReadyError, match="No server has said yet which models it has"):  # all load
        models.refuse_if_untold()
    server.is_healthy = True
    try:
        with caplog.at_level(logging.ERROR):
            for _ in range(5):
                models.update()
        models.refuse_if_untold()
        assert len(models.names) == 3
        assert [record.getMessage() for record in caplog.records] == [
            "the servers have more than 3 models; 47 are left out, such as model-3"
        ]
        with pytest.raises(BadParameterError, match="are those of its servers"):
            await models.unregister("model-0")
    finally:
        await models.stop()
