"""Refuses names of models that no model has, before a request waits for a worker that would refuse it too."""

from __future__ import annotations

from lmi_server.dialects.openai.request import unknown_model
from lmi_server.dialects.routes import means_any_model
from lmi_server.serving.models.model import Model
from lmi_server.serving.models.registry import ModelRegistry


def refuse_unknown(models: ModelRegistry, model: Model, name: str) -> None:
    """Raise ModelNotFoundError if `name`, the `model` of a body that goes to `model`, is no name of it or its adapters.

    A model that loads answers to any name here: its own names are not known yet. So does one whose own code may read
    the body. Any other name may be that of an adapter if the model loads adapters on demand.
    """
    if model.pool is None or model.resolved is None or _is_known(model, name):
        return
    if model.pool.on_demand is None and not models.reads_by_code(model):
        raise unknown_model(name, (*model.resolved.served_names, *model.adapter_names))


def _is_known(model: Model, name: str) -> bool:
    assert model.pool is not None
    assert model.resolved is not None
    served = model.resolved.served_names
    if name in served or name in model.pool.adapters or means_any_model(name):
        return True
    base, _, adapter = name.rpartition(":")
    return base in served and adapter in model.pool.adapters
