"""LMI's adapter API, which registers, lists, describes, updates and unregisters LoRA adapters over HTTP."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from frontend.access.registration_limits import RegistrationLimits
from frontend.http.parameters import check_name, page, parameters, truth
from frontend.http.responses import json_response
from frontend.management.models import WholePathRoute, to_the_end
from lmi_server.contract.errors import BadParameterError, RequestError
from lmi_server.contract.protocol import Adapter
from lmi_server.contract.texts.secrets import mask_url
from lmi_server.dialects.adapters import ALIAS_HEADER
from lmi_server.serving.adapters.adapters import Adapters, RegisteredAdapter, fetch_adapter
from lmi_server.serving.models.model import Model
from lmi_server.serving.models.registry import ModelRegistry

logger = logging.getLogger(__name__)

_KNOWN = frozenset({"name", "src", "preload", "pin", "model_version"})


class AdapterManagement:
    """The endpoints. Each raises LmiServerError, which the application turns into an answer.

    A path without a model means the model that answers requests without a name. If a model has several versions, the
    parameter `model_version` names one.
    """

    def __init__(self, models: ModelRegistry, limits: RegistrationLimits) -> None:
        self._models = models
        self._limits = limits

    def routes(self) -> list[Route]:
        """Return the routes. They must precede the models' routes, in which "adapters" would be taken for a version."""
        return [
            route
            for prefix in ("/models/{model}", "")
            for route in (
                WholePathRoute(f"{prefix}/adapters", {"GET": self.list, "POST": self.register}),
                WholePathRoute(f"{prefix}/adapters/{{adapter}}", {"GET": self.describe, "DELETE": self.unregister}),
                WholePathRoute(f"{prefix}/adapters/{{adapter}}/update", {"POST": self.update}),
            )
        ]

    async def list(self, request: Request) -> Response:
        adapters = self._adapters(request)
        names, more = page(request.query_params, adapters.names)
        return json_response({**more, "adapters": [_row(adapters.get(name)) for name in names]})

    async def describe(self, request: Request) -> Response:
        return json_response(_row(self._adapters(request).get(request.path_params["adapter"])))

    async def register(self, request: Request) -> Response:
        given = await parameters(request)
        model, adapters = self._model(request), self._adapters(request)
        name = _require(given, "name")
        self._check_name(name, model)
        adapters.refuse_known(name)
        alias = request.headers.get(ALIAS_HEADER, name)
        wanted = Adapter(
            name=name,
            directory="",
            preload=truth(given, "preload", True),
            pin=truth(given, "pin", False),
            alias=alias,
            options=_options(given),
        )
        status = await self.put(model, wanted, _require(given, "src"), request)
        _warn_of_options(model, wanted)
        return json_response({"status": status or f"Adapter {alias} registered"})

    async def put(self, model: Model, wanted: Adapter, source: str, request: Request) -> str:
        """Register an adapter, or replace the one of its name, from where its files are; return the handler's message.

        Raises PermissionDeniedError for a source that the client may not name, and whatever a worker refuses.
        """
        adapters = lora_of(model)
        self._check_name(wanted.name, model)
        source = await self._checked_source(model, source, request)
        return await to_the_end(self._put(model, wanted, source, is_new=wanted.name not in adapters))

    async def remove(self, model: Model, name: str) -> str:
        """Remove an adapter; return the handler's message. Raises ModelNotFoundError."""
        registered = lora_of(model).get(name)
        return await to_the_end(self._remove(model, registered.name))

    async def update(self, request: Request) -> Response:
        given = await parameters(request)
        model = self._model(request)
        before = self._adapters(request).get(request.path_params["adapter"])
        source = given.get("src", "").strip()
        if source:
            source = await self._checked_source(model, source, request)
        wanted = msgspec.structs.replace(
            before.adapter,
            preload=truth(given, "preload", before.adapter.preload),
            pin=truth(given, "pin", before.adapter.pin),
            options={**before.adapter.options, **_options(given)},
        )
        status = await to_the_end(self._put(model, wanted, source or before.source, is_new=False))
        _warn_of_options(model, wanted)
        return json_response({"status": status or f"Adapter {before.alias} updated"})

    async def unregister(self, request: Request) -> Response:
        registered = self._adapters(request).get(request.path_params["adapter"])
        status = await self.remove(self._model(request), registered.name)
        return json_response({"status": status or f"Adapter {registered.alias} unregistered"})

    async def _put(self, model: Model, wanted: Adapter, source: str, is_new: bool) -> str:
        fetched = await self._fetch(model, wanted, source)
        await model.until_reloaded()
        adapters = model.loaded().adapters
        return await (adapters.register if is_new else adapters.update)(fetched)

    async def _remove(self, model: Model, name: str) -> str:
        await model.until_reloaded()
        return await model.loaded().adapters.remove(name)

    async def _fetch(self, model: Model, wanted: Adapter, source: str) -> RegisteredAdapter:
        """Fetch the files of an adapter and return it with their directory."""
        if wanted.pin and not wanted.preload:
            raise RequestError("preload=false is not allowed with pin=true; leave one of them out")
        assert model.resolved is not None
        resolved = model.resolved
        own_code = resolved.spec.runs_user_code
        directory = await fetch_adapter(source, resolved.model_dir, self._models.artifacts, own_code)
        await asyncio.to_thread(self._models.refuse_unsafe_adapter, directory)
        return RegisteredAdapter(adapter=msgspec.structs.replace(wanted, directory=directory), source=source)

    async def _checked_source(self, model: Model, source: str, request: Request) -> str:
        """Return the source to use. Raises PermissionDeniedError."""
        assert model.resolved is not None
        return await asyncio.to_thread(self._limits.check_adapter, source, model.resolved.model_dir, request.scope)

    def _check_name(self, name: str, model: Model) -> None:
        check_name("name", name)
        if name in self._models.names:
            raise BadParameterError(f'Parameter name is "{name}", which is the name of a model; choose another')

    def _model(self, request: Request) -> Model:
        name, version = request.path_params.get("model"), request.query_params.get("model_version")
        return managed_model(self._models, name, version, "in the path: /models/{model}/adapters")

    def _adapters(self, request: Request) -> Adapters:
        return lora_of(self._model(request))


def managed_model(models: ModelRegistry, name: str | None, version: str | None, where: str) -> Model:
    """Return the one model that a call of the management API means; without a name it is the default one.

    The version "" is the model without a version, which may stand beside others. Raises BadParameterError if none or
    several may be meant. `where` says where the call can name one.
    """
    endpoint = models.default if name is None else models.endpoint(name)
    if endpoint is None:
        models.refuse_if_untold()
        raise BadParameterError(f"Several models are served; name one {where}")
    if version is None and len(endpoint.models) > 1:
        unversioned = any(model.version is None for model in endpoint.models)
        remedy = '; model_version="" is the one without a version' if unversioned else ""
        raise BadParameterError(f"Parameter model_version is required: the model has several versions{remedy}")
    return endpoint.choose(None) if version is None else endpoint.version(version or None)


def lora_of(model: Model) -> Adapters:
    """Return the adapters of a loaded model. Raises BadParameterError if it serves none."""
    adapters = model.loaded().adapters
    assert model.resolved is not None
    if not model.resolved.options.enable_lora:
        remedy = model.resolved.spec.adapters_instead or "Set option.enable_lora=true in serving.properties"
        raise BadParameterError(f"LoRA is not enabled. {remedy[0].upper()}{remedy[1:]}")
    return adapters


def _row(registered: RegisteredAdapter) -> dict[str, Any]:
    adapter = registered.adapter
    return {"name": adapter.name, "src": mask_url(registered.source), "preload": adapter.preload, "pin": adapter.pin}


def _require(given: Mapping[str, str], name: str) -> str:
    value = given.get(name, "").strip()
    if not value:
        raise BadParameterError(f"Parameter {name} is required.")
    return value


def _options(given: Mapping[str, str]) -> dict[str, str]:
    """Return the parameters that are not LMI's; only a `model.py` may read them."""
    return {name: value for name, value in given.items() if name not in _KNOWN}


def _warn_of_options(model: Model, adapter: Adapter) -> None:
    assert model.resolved is not None
    if adapter.options and not model.resolved.spec.runs_user_code:
        logger.warning("adapter %s: no handler reads parameters %s", adapter.name, ", ".join(sorted(adapter.options)))
