"""The list of models that can answer, in OpenAI's form, or in the dialect's form by a header of the request."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from frontend.http.clients import Scope, shown_path
from frontend.http.responses import error_response, json_response
from lmi_server.contract.errors import BadParameterError, ModelNotFoundError
from lmi_server.dialects.optional import ModelListForm, optional_dialects
from lmi_server.serving.models.model import Endpoint, Model
from lmi_server.serving.models.registry import ModelRegistry
from lmi_server.serving.pool_settings import ModelStatus

_ABLE = (ModelStatus.HEALTHY, ModelStatus.UNHEALTHY)  # the workers of the latter are started again


class _Named(NamedTuple):
    """A model under one of its names, or an adapter of it."""

    name: str
    model: Model


class ModelList:
    """Answers /v1/models and /v1/models/{model}."""

    def __init__(self, models: ModelRegistry) -> None:
        self._models = models

    async def models(self, request: Request) -> Response:
        """Return the models that can answer now; adapters are models here."""
        able = self._able()
        stores = await asyncio.gather(*(model.stored_adapters() for model in self._models.models))
        in_stores = zip(self._models.models, stores, strict=True)
        able += [_Named(name, model) for model, names in in_stores if model.status in _ABLE for name in names]
        form = _form(request)
        if form is None:
            return json_response({"object": "list", "data": [self._entry(*each, request.scope) for each in able]})
        try:
            created = [(each.name, _created_at(*each)) for each in able]
            return json_response(form.page(created, request.query_params))
        except BadParameterError as error:
            return error_response(form.route, error)

    async def model(self, request: Request) -> Response:
        """Return the description of a model or an adapter."""
        name, form = request.path_params["model"], _form(request)
        try:
            model = self._models.named_as_model(name)
        except ModelNotFoundError as error:
            if form is None:
                raise
            return error_response(form.route, error)
        if form is not None:
            return json_response(form.entry(name, _created_at(name, model)))
        return json_response(self._entry(name, model, request.scope))

    def _entry(self, name: str, model: Model, scope: Scope) -> dict[str, Any]:
        """Return OpenAI's model object, with the additional fields of vLLM that its clients read.

        `root` is the path or hub id of the weights, as far as it is known, and this client may know it. `max_model_len`
        is there once the model has loaded. What is no name of a model is an adapter, which names its `parent`.
        """
        entry: dict[str, Any] = {"id": name, "object": "model", "created": int(_created_at(name, model))}
        entry |= {"owned_by": "lmi-server", "root": place_of(name, model, scope)}
        entry["parent"] = None if name in self._models.names else model.name
        if model.pool is not None and model.pool.members.max_model_len:
            entry["max_model_len"] = model.pool.members.max_model_len
        return entry

    def _able(self) -> list[_Named]:
        endpoints = {name: self._models.endpoint(name) for name in self._models.names}
        able = [_Named(name, model) for name, endpoint in endpoints.items() for model in _able_version(endpoint)]
        adapted = [model for model in self._models.models if model.status in _ABLE]
        return able + [_Named(name, model) for model in adapted for name in model.adapter_names]


def _form(request: Request) -> ModelListForm | None:
    """Return the form that a header of the request asks for, None for OpenAI's."""
    forms = optional_dialects().model_lists
    return next((form for header, form in forms.items() if header in request.headers), None)


def _able_version(endpoint: Endpoint) -> Sequence[Model]:
    """Return the first version of a model that can answer, if there is one."""
    return [model for model in endpoint.models if model.status in _ABLE][:1]


def _created_at(name: str, model: Model) -> float:
    """Return when a model or an adapter was registered, by time.time()."""
    is_adapter = model.pool is not None and name in model.pool.adapters
    return model.pool.adapters.registered_at(name) if is_adapter and model.pool is not None else model.registered_at


def place_of(name: str, model: Model, scope: Scope) -> str:
    """Return the path or hub id of a model or an adapter, as far as this client may know it."""
    if model.pool is not None and name in model.pool.adapters:
        return shown_path(model.pool.adapters.get(name).source, name, scope)
    place = None if model.resolved is None else model.resolved.options.model_id
    return shown_path(place or model.name, model.name, scope)
