"""Sends one request to one model, without a server: `lmi-server test-model`."""

from __future__ import annotations

import mimetypes
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import uvloop

from lmi_server.artifacts.fetch import ArtifactSettings, artifact_settings
from lmi_server.configuration.resolve import inspect_model
from lmi_server.contract.errors import ConfigurationError, LmiServerError, error_from_kind
from lmi_server.contract.protocol import End, Error, Input, Reply
from lmi_server.dialects.errors import error_reply
from lmi_server.dialects.routes import INVOCATIONS
from lmi_server.serving.models.model_store import ModelSource
from lmi_server.serving.models.registry import ModelRegistry
from lmi_server.supervisor.job import Job


def run_once(
    source: ModelSource, inputs: Sequence[str], parameters: Sequence[str], environment: Mapping[str, str]
) -> int:
    """Load the model, send it a request of `inputs` and `parameters`, and write the answer to standard output.

    Returns the exit code: 0 if the status of the answer is below 400, else 1. Raises ConfigurationError if a parameter
    is not name=value.
    """
    request = make_request(inputs, parameters)
    return uvloop.run(_run(source, request, environment, artifact_settings(None, environment)))


def make_request(inputs: Sequence[str], parameters: Sequence[str]) -> Input:
    """Make a request. An input is a file, a text, or name=file or name=text; one without a name is the body.

    Raises ConfigurationError if a parameter is not name=value.
    """
    properties, names = {}, []
    for parameter in parameters:
        name, separator, value = parameter.partition("=")
        if not separator:
            raise ConfigurationError(f'--parameters "{parameter}" is not allowed; allowed: name=value')
        properties[name.lower()] = value
        names.append(name)
    content = [_part(given) for given in inputs] or [("data", b"", None)]
    types = [content_type for name, _, content_type in content if name == "data" and content_type]
    if types:
        properties.setdefault("content-type", types[-1])
    return Input(INVOCATIONS, properties, [(name, data) for name, data, _ in content], names="\n".join(names))


def _part(given: str) -> tuple[str, bytes, str | None]:
    """Return name, bytes and content type of one input."""
    name, separator, value = given.partition("=")
    if separator and name.isidentifier() and not os.path.isfile(given):
        return (name, *_data(value))
    return ("data", *_data(given))


def _data(value: str) -> tuple[bytes, str | None]:
    # os.path.isfile returns False for a text that is too long for a path; Path.is_file raises OSError.
    if os.path.isfile(value):
        return Path(value).read_bytes(), mimetypes.guess_type(value)[0]
    is_json = value.lstrip().startswith(("{", "["))
    return value.encode(), "application/json" if is_json else "text/plain"


async def _run(source: ModelSource, request: Input, environment: Mapping[str, str], artifacts: ArtifactSettings) -> int:
    models = ModelRegistry(environment, artifacts, inspect_model, drain_timeout_s=0.0, log_level="INFO")
    try:
        model = await models.register_and_load(source)
        return await _print_answer(model.loaded().submit(request, on_overflow=lambda: None))
    except LmiServerError as error:
        print(error.message, file=sys.stderr)
        return 1
    finally:
        await models.stop()


async def _print_answer(job: Job) -> int:
    reply = job.reply
    while reply.terminal is None:
        await reply.wait()
        _write(reply.take())
    _write(reply.take())
    status, data = _ending(reply.terminal)
    _write(data)
    if status >= 400:
        print(f"status {status}", file=sys.stderr)
    return 0 if status < 400 else 1


def _ending(terminal: Reply | End | Error) -> tuple[int, bytes]:
    match terminal:
        case Reply(_, status, _, data):
            return status, data
        case End(_, status):
            return status, b""
        case Error(_, kind, message):
            status, _, data = error_reply(INVOCATIONS, error_from_kind(kind, message))
            return status, data


def _write(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()
