"""The models of a server by their names, and which of them is chosen for a request."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from lmi_server.contract.errors import ConfigurationError, ModelExistsError, ModelNotFoundError
from lmi_server.contract.texts.quoting import excerpt
from lmi_server.serving.models.model import Endpoint, Model
from lmi_server.serving.pool_settings import ModelStatus

logger = logging.getLogger(__name__)


class ModelCatalog:
    """Every model of a server.

    `default` is for requests that name none: the only model from the start of the server, or the only one at all, which
    is also `only`.
    """

    def __init__(self) -> None:
        self.only: Endpoint | None = None
        self.default: Endpoint | None = None
        self._endpoints: dict[str, Endpoint] = {}
        self._aliases: dict[str, Endpoint] = {}

    async def follow(self) -> None:
        """Follow what another process says of the models; a single server has none to follow."""

    async def until_told(self) -> None:
        """Return once it is known which models there are; a single server knows it from the start."""

    def refuse_if_untold(self) -> None:
        """Raise ModelNotReadyError while it is not known which models there are."""

    @property
    def endpoints(self) -> list[Endpoint]:
        """Return every model with its versions, by name."""
        return [self._endpoints[name] for name in sorted(self._endpoints)]

    @property
    def models(self) -> list[Model]:
        return [model for endpoint in self.endpoints for model in endpoint.models]

    @property
    def names(self) -> list[str]:
        """Return every name under which requests may ask for a model: each model's own name, then its aliases."""
        names = []
        for endpoint in self.endpoints:
            names += [endpoint.name, *(alias for alias, target in self._aliases.items() if target is endpoint)]
        return names

    @property
    def startup_statuses(self) -> set[ModelStatus]:
        """Return the statuses that models of the start have."""
        return {model.status for model in self.models if model.at_startup}

    def has(self, name: str) -> bool:
        """Return whether a model or an adapter has that name."""
        return self._find(name) is not None or self._with_adapter(name) is not None

    def endpoint(self, name: str) -> Endpoint:
        """Return the model of that name or alias. Raises ModelNotFoundError."""
        endpoint = self._find(name)
        if endpoint is None:
            self.refuse_if_untold()
            raise ModelNotFoundError(f"Model or workflow not found: {excerpt(name)}")
        return endpoint

    def find(self, name: str, version: str | None = None) -> Model:
        """Return the model that a request names. Raises ModelNotFoundError."""
        return self.endpoint(name).choose(version)

    def named_as_model(self, name: str, version: str | None = None) -> Model:
        """Return the model that an OpenAI request means by `model`: a name, or the name of an adapter."""
        if self._find(name) is None:
            model = self._with_adapter(name, version)
            if model is not None:
                return model
            base, _, adapter = name.rpartition(":")
            if adapter and self._find(base) is not None:
                return self.find(base, version)  # model:adapter, as with Ray Serve LLM; the worker knows its adapters
        return self.find(name, version)

    def reads_by_code(self, model: Model) -> bool:
        """Return whether code of the user may read the bodies for `model`, and so take any name of a model in them."""
        return model.runs_user_code or model.has_code

    def _find(self, name: str) -> Endpoint | None:
        return self._endpoints.get(name) or self._aliases.get(name)

    def _with_adapter(self, name: str, version: str | None = None) -> Model | None:
        """Return the first model with an adapter of that name."""
        for model in self.models:
            if model.pool is not None and name in model.pool.adapters and version in (None, model.version):
                return model
        return None

    def _add(self, model: Model) -> None:
        """Raise ModelExistsError if a model has its name and version."""
        source = model.source
        endpoint = self._endpoints.get(source.name) or Endpoint(source.name)
        # Nothing could name a model without a version that stands beside its versions.
        taken = any(other.label == source.label for other in self.models)
        if taken or source.name in self._aliases or (source.version is None and endpoint.models):
            raise ModelExistsError(f"Workflow {source.label} is already registered.")
        endpoint.models.append(model)
        self._endpoints[source.name] = endpoint
        self._choose_default()

    def _forget(self, model: Model) -> None:
        endpoint = self._endpoints.get(model.name)
        if endpoint is None or model not in endpoint.models:
            return
        endpoint.models.remove(model)
        if not endpoint.models:
            del self._endpoints[model.name]
            self._aliases = {alias: target for alias, target in self._aliases.items() if target is not endpoint}
        self._choose_default()
        logger.info("model %s is unregistered", model.label)

    def _choose_default(self) -> None:
        everyone = list(self._endpoints.values())
        at_startup = [endpoint for endpoint in everyone if any(model.at_startup for model in endpoint.models)]
        self.only = everyone[0] if len(everyone) == 1 else None
        self.default = at_startup[0] if len(at_startup) == 1 else self.only

    def refuse_taken_names(self, name: str, aliases: Sequence[str]) -> None:
        """Raise ConfigurationError if another model than `name` has one of the aliases."""
        endpoint = self._endpoints[name]
        for alias in aliases:
            owner = self._find(alias) or endpoint
            if owner is not endpoint:
                raise ConfigurationError(
                    f'option.served_model_name = "{excerpt(alias)}" is a name of model {owner.name}; choose another'
                )

    def renew_aliases(self, name: str) -> None:
        """Give a model the names that the configurations of its versions have now."""
        endpoint = self._endpoints[name]
        given = [model.resolved.options.served_model_name for model in endpoint.models if model.resolved is not None]
        others = {alias: target for alias, target in self._aliases.items() if target is not endpoint}
        self._aliases = others | {alias: endpoint for names in given for alias in names if alias != endpoint.name}
