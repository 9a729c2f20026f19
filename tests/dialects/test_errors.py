from __future__ import annotations

import json

import pytest

from lmi_server.contract import errors
from lmi_server.contract.errors import LmiServerError
from lmi_server.dialects.errors import error_event, error_reply, is_openai

ROWS = [
    # error, OpenAI's status and code, LMI's status and type
    (errors.RequestError, 400, None, 424, "BadRequestException"),
    (errors.ContextLengthError, 400, "context_length_exceeded", 424, "BadRequestException"),
    (errors.PayloadTooLargeError, 413, None, 413, "PayloadTooLargeException"),
    (errors.ModelNotFoundError, 404, "model_not_found", 404, "ModelNotFoundException"),
    (errors.RouteNotFoundError, 404, "unknown_url", 404, "ResourceNotFoundException"),
    (errors.MethodNotAllowedError, 405, "method_not_supported", 405, "MethodNotAllowedException"),
    (errors.QueueFullError, 503, "queue_full", 503, "WlmCapacityException"),
    (errors.ModelNotReadyError, 503, "model_not_ready", 503, "WlmException"),
    (errors.WorkerDiedError, 503, "worker_died", 503, "WlmException"),
    (errors.HandlerError, 500, None, 424, "EngineException"),
    (errors.PredictTimeoutError, 503, "predict_timeout", 503, "WlmException"),
    (errors.BadParameterError, 400, None, 400, "BadRequestException"),
    (errors.ModelExistsError, 409, "model_exists", 409, "BadRequestException"),
    (errors.ModelLoadError, 500, "model_load_failed", 500, "EngineException"),
    (errors.ModelMemoryError, 507, "out_of_memory", 507, "WlmOutOfMemoryException"),
    (errors.ConfigurationError, 400, "bad_configuration", 400, "IllegalConfigurationException"),
    (errors.ServingError, 500, None, 500, "InternalServerException"),
]


@pytest.mark.parametrize(("cls", "status", "code", "_lmi_status", "_lmi_type"), ROWS)
def test_openai_reply(
    cls: type[LmiServerError], status: int, code: str | None, _lmi_status: int, _lmi_type: str
) -> None:
    got_status, headers, body = error_reply("chat/completions", cls('not "so"'))
    assert got_status == status
    assert ("content-type", "application/json") in headers
    error = json.loads(body)["error"]
    assert error["message"] == 'not "so"'
    assert error["code"] == code
    assert error["param"] is None
    assert (error["type"] == "invalid_request_error") == (status < 500)


@pytest.mark.parametrize(("cls", "_status", "_code", "lmi_status", "lmi_type"), ROWS)
def test_lmi_reply(cls: type[LmiServerError], _status: int, _code: str | None, lmi_status: int, lmi_type: str) -> None:
    status, headers, body = error_reply("invocations", cls("no"))
    assert status == lmi_status
    assert ("content-type", "application/json") in headers
    assert json.loads(body) == {"code": lmi_status, "type": lmi_type, "message": "no", "error": "no"}


def _subclasses(cls: type[LmiServerError]) -> set[type[LmiServerError]]:
    return {cls}.union(*(_subclasses(child) for child in cls.__subclasses__()))


@pytest.mark.parametrize("cls", sorted(_subclasses(LmiServerError), key=lambda cls: cls.__name__))
@pytest.mark.parametrize("route", ["invocations", "predictions", "completions", "models"])
def test_every_error_has_a_reply(cls: type[LmiServerError], route: str) -> None:
    status, _, body = error_reply(route, cls("no"))
    assert 400 <= status < 600
    assert json.loads(body)


def test_retry_after_only_if_a_retry_helps() -> None:
    assert ("retry-after", "1") in error_reply("invocations", errors.QueueFullError("full"))[1]
    assert ("retry-after", "5") in error_reply("completions", errors.ModelNotReadyError("loading"))[1]
    assert "retry-after" not in dict(error_reply("completions", errors.RequestError("bad"))[1])


@pytest.mark.parametrize(
    ("route", "expected"),
    [
        ("completions", True),
        ("chat/completions", True),
        ("models", False),
        ("/v1/unknown", True),
        ("v1", True),
        ("invocations", False),
        ("predictions", False),
        ("/ping", False),
        ("/v10", False),
    ],
)
def test_which_routes_speak_openai(route: str, expected: bool) -> None:
    assert is_openai(route) is expected


def test_events_are_framed_as_the_stream_is() -> None:
    error = errors.HandlerError("engine\u2028broke")
    event = error_event("completions", "text/event-stream; charset=utf-8", error)
    assert event.startswith(b'data: {"error":{')
    assert event.endswith(b"}\n\n")
    assert b"[DONE]" not in event

    line = error_event("invocations", "application/jsonlines", error)
    assert line.endswith(b"}\n")
    assert len(line.decode().splitlines()) == 1
    assert json.loads(line)["error"] == "engine\u2028broke"

    assert json.loads(error_event("invocations", "application/json", error))["code"] == 424
