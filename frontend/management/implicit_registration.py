"""Registers a model with the first request for it, if the request has a `model_url` that the server allows."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence

from frontend.access.registration_limits import RegistrationLimits, leads_up
from frontend.management.models import model_source, to_the_end
from lmi_server.contract.errors import ModelNotFoundError
from lmi_server.contract.texts.quoting import excerpt
from lmi_server.serving.models.model import Model
from lmi_server.serving.models.registry import ModelRegistry

# LMI's names in requests, and the parameters of a registration that they stand for.
_PARAMETERS = {
    "model_url": "url",
    "model_name": "model_name",
    "model_version": "model_version",
    "engine_name": "engine",
    "device": "device",
}
REGISTERED_IN_FORMS = tuple(_PARAMETERS)
_LONGEST_URL = 2048  # characters: the pattern may take long for each


class ImplicitRegistration:
    """What LMI's `model_url_pattern` switches on. A URL must match the whole pattern, wherever the request has it."""

    def __init__(self, models: ModelRegistry, limits: RegistrationLimits, pattern: str) -> None:
        self._models = models
        self._limits = limits
        self._pattern = re.compile(pattern)

    async def register(
        self,
        name: str | None,
        version: str | None,
        properties: Mapping[str, str],
        content: Sequence[tuple[str, bytes]],
    ) -> Model | None:
        """Register and load the model that a request describes; return it, None if the request has no `model_url`.

        `name` and `version` are those of the path. Headers go before `content`, the query and the fields of a form.
        Raises ModelNotFoundError if the URL does not match, PermissionDeniedError if `registration_sources` does not
        allow it, or what the registration raises.
        """
        sent = {key: value.decode("utf-8", "replace") for key, value in content}
        sent |= properties
        given = {parameter: sent[key] for key, parameter in _PARAMETERS.items() if sent.get(key)}
        given |= {"model_name": name} if name else {}
        given |= {"model_version": version} if version else {}
        if "url" not in given:
            return None
        url = given["url"]
        if len(url) > _LONGEST_URL or self._pattern.fullmatch(url) is None or leads_up(url):
            raise ModelNotFoundError(f"model_url {excerpt(url)} does not match the model_url_pattern of the server")
        source = await asyncio.to_thread(self._limits.check_requested, model_source(given))
        return await to_the_end(self._models.register_and_load(source))
