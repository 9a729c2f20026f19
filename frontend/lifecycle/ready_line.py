"""The log line of a server that is ready: its address, and how to try it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence

from frontend.http.listeners import Listener
from lmi_server.configuration.server_settings import UNIX, ServerSettings
from lmi_server.serving.models.model import Model
from lmi_server.serving.pool_settings import ModelStatus

_SPEECH_RECOGNITION = "automatic-speech-recognition"  # the value of option.task


def ready_line(
    listeners: Sequence[Listener], settings: ServerSettings, models: Sequence[Model], pages: Mapping[str, str]
) -> str:
    """Return the URLs of the API and of `pages` (paths by name), and a request with curl if a model can answer one."""
    api, managing = listeners[0].url, listeners[-1].url
    shown = {} if managing.startswith(UNIX) else pages
    urls = "".join(f", {name} {managing}{path}" for name, path in shown.items())
    able = [model for model in models if model.status is ModelStatus.HEALTHY]
    curl = f"; try: {_curl(api, settings, able[0])}" if able and not api.startswith(UNIX) else ""
    return f"ready: API {api}{urls}{curl}"


def _curl(url: str, settings: ServerSettings, model: Model) -> str:
    has_keys = settings.api_keys or settings.api_keys_file
    key = " -H 'Authorization: Bearer KEY'" if has_keys else ""
    if model.resolved is not None and getattr(model.resolved.options, "task", None) == _SPEECH_RECOGNITION:
        return f"curl {url}/v1/audio/transcriptions{key} -F file=@FILE -F {shlex.quote(f'model={model.name}')}"
    if model.resolved is None or not model.resolved.spec.formats_text:
        return (
            f"curl {url}/models/{shlex.quote(model.name)}" if settings.management_port is None else f"curl {url}/ping"
        )
    body = {"model": model.name, "max_tokens": 32, "messages": [{"role": "user", "content": "Hello"}]}
    json_type = " -H 'Content-Type: application/json'"
    return f"curl {url}/v1/chat/completions{key}{json_type} -d {shlex.quote(json.dumps(body))}"
