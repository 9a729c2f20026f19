"""Which model a request is for: its path, query, headers or body name it, or it is the default one."""

from __future__ import annotations

from frontend.relay.request import MODEL_IN_BODY, RelayedRequest, last_of
from lmi_server.contract.errors import BadParameterError, RouteNotFoundError
from lmi_server.dialects.forms import form_fields
from lmi_server.dialects.openai.request import unknown_model
from lmi_server.dialects.routes import PREDICTIONS, TGI, means_any_model
from lmi_server.serving.models.model import Model
from lmi_server.serving.models.registry import ModelRegistry

_IN_FORMS = ("model_name", "model")


class ModelChoice:
    """Chooses among `models`. Raises ModelNotFoundError for a name that none of them has."""

    def __init__(self, models: ModelRegistry) -> None:
        self._models = models

    def by_head(self, request: RelayedRequest, name: str | None, version: str | None) -> Model | None:
        """Return the model that path, query or headers name, or the default one; None if only the body can name it.

        The path has `name` and `version`.
        """
        asked = version or request.parameter("model_version")
        if name is not None and version is None and request.route == PREDICTIONS:
            return self._models.endpoint(name).choose_preferring(asked)
        name = name or request.parameter("model_name")
        if name:
            return self._models.find(name, asked)
        if self._models.only is not None:
            return self._models.only.choose(asked)
        if self._models.default is not None and request.route not in MODEL_IN_BODY and not request.has_form:
            return self._models.default.choose(asked)
        return None

    def by_body(self, request: RelayedRequest, body: bytes, version: str | None) -> Model:
        """Return the model of the head, or the one that the body names, or the default one.

        An OpenAI request names it in `model`, also if it is a form; another form names it in `model_name`. Raises
        ModelNotFoundError if `model` is a name of another model.
        """
        names_in_body = request.route in MODEL_IN_BODY
        name: str | None = None
        in_form: str | None = None
        form = form_fields(request.properties["content-type"], body, _IN_FORMS) if request.has_form else None
        if form is None:
            name, _ = request.fields_in(body)
        else:
            name, in_form = last_of(form, "model") if names_in_body else None, last_of(form, "model_name")
        model = request.model
        if model is None:
            model = self._find(request.route, name, in_form, version or request.parameter("model_version"))
        if name is not None and names_in_body:
            self._refuse_unknown(model, name)
        return model

    def _find(self, route: str, name: str | None, in_form: str | None, version: str | None) -> Model:
        """Return the model of a body with `name` in `model` and `in_form` in a form's `model_name`, or the default."""
        models = self._models
        if in_form:
            return models.find(in_form, version)
        default = models.default
        # Clients send some names to any server with one model.
        if name is not None and (default is None or not means_any_model(name) or models.has(name)):
            return models.named_as_model(name, version)
        if default is not None:
            return default.choose(version)
        models.refuse_if_untold()
        if route == TGI:
            raise RouteNotFoundError("Requested resource is not found: /; with several models, send model_name with it")
        raise BadParameterError("Parameter model_name is required.")

    def _refuse_unknown(self, model: Model, name: str) -> None:
        """Raise ModelNotFoundError if `name` is no name of `model` or its adapters, before the request has to wait.

        A model that loads answers to any name here: its own names are not known yet. So does one whose own code may
        read the body. Any other name may be that of an adapter if the model loads adapters on demand.
        """
        pool, resolved = model.pool, model.resolved
        if pool is None or resolved is None:
            return
        served = resolved.served_names
        if name in served or name in pool.adapters or means_any_model(name):
            return
        base, _, adapter = name.rpartition(":")
        if base in served and adapter in pool.adapters:
            return
        if pool.on_demand is None and not self._models.reads_by_code(model):
            raise unknown_model(name, (*served, *model.adapter_names))
