"""The line of the log that says that the server is ready, where it is, and how to try it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence

from frontend.console.pages import PAGE
from frontend.http.listeners import Listener
from lmi_server.configuration.server_settings import UNIX, ServerSettings
from lmi_server.serving.models.model import Model
from lmi_server.serving.pool_settings import ModelStatus


def ready_line(listeners: Sequence[Listener], settings: ServerSettings, models: Sequence[Model]) -> str:
    """Return the URLs of the API and of the console, and a request with curl if a model can answer one."""
    api, managing = listeners[0].url, listeners[-1].url
    console = f", console {managing}{PAGE}" if settings.console and not managing.startswith(UNIX) else ""
    able = [model for model in models if model.status is ModelStatus.HEALTHY]
    curl = f"; try: {_curl(api, settings, able[0])}" if able and not api.startswith(UNIX) else ""
    return f"ready: API {api}{console}{curl}"


def _curl(url: str, settings: ServerSettings, model: Model) -> str:
    if model.resolved is None or not model.resolved.spec.formats_text:
        return (
            f"curl {url}/models/{shlex.quote(model.name)}" if settings.management_port is None else f"curl {url}/ping"
        )
    body = {"model": model.name, "max_tokens": 32, "messages": [{"role": "user", "content": "Hello"}]}
    has_keys = settings.api_keys or settings.api_keys_file
    key = " -H 'Authorization: Bearer KEY'" if has_keys else ""
    json_type = " -H 'Content-Type: application/json'"
    return f"curl {url}/v1/chat/completions{key}{json_type} -d {shlex.quote(json.dumps(body))}"
