"""Stateful sessions of a model that generates text. Requests open and close them; a header names them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from djl_python.session_manager import Session, SessionManager, save_sessions

from lmi_server.configuration.options import ModelOptions
from lmi_server.contract.errors import HandlerError, RequestError
from lmi_server.contract.handler import Response
from lmi_server.contract.protocol import Input
from lmi_server.dialects import fields
from lmi_server.dialects.framing import encode

_HEADER = "X-Amzn-SageMaker-Session-Id"
_CLOSED_HEADER = "X-Amzn-SageMaker-Closed-Session-Id"
_KEY = "requestType"
_JSON = ("content-type", "application/json")


class SessionRequests:
    """Answers requests that open or close a session, and checks the session of all others."""

    def __init__(self, options: ModelOptions) -> None:
        names = ("sessions_path", "sessions_expiration", "sessions_s3url")
        self._manager = SessionManager({name: getattr(options, name) for name in names})

    @staticmethod
    def concerns(request: Input) -> bool:
        """Return whether a request names a session, or may open one. It is cheap: every request goes through it."""
        # A substring instead of JSON: a prompt that contains the word by chance is only looked at twice.
        return _HEADER.lower() in request.properties or _KEY.encode() in request.body()

    def save(self) -> None:
        """Save every session, if the options say so."""
        save_sessions()

    def answer(self, request: Input) -> Response | None:
        """Return the answer to a request that opens or closes a session; None if the request is for the model.

        It may wait for files and for S3. Raises RequestError if the session is unknown or the request asks for
        something else, HandlerError if the sessions cannot be stored.
        """
        try:
            return self._answer(request)
        except OSError as error:
            raise HandlerError(f"the session cannot be stored: {error}") from error

    def _answer(self, request: Input) -> Response | None:
        named = request.properties.get(_HEADER.lower())
        if _KEY.encode() not in request.body():
            self._check(named)
            return None
        kind = _kind(request)
        if kind == "NEW_SESSION":
            return _open_response(self._manager.create_session())
        if kind == "CLOSE":
            return self._close(named)
        if kind is not None:
            raise fields.not_allowed(_KEY, kind, "send NEW_SESSION or CLOSE")
        self._check(named)
        return None

    def _check(self, named: str | None) -> None:
        """Raise RequestError if there is no session of that name. An expired one passes, as with LMI."""
        try:
            self._manager.get_session(named)
        except ValueError as error:
            raise RequestError(str(error)) from None

    def _close(self, named: str | None) -> Response:
        if not named:
            raise RequestError(f"{_HEADER} is missing; send the id of the session to close")
        try:
            self._manager.close_session(named)
        except ValueError as error:
            raise RequestError(str(error)) from None
        return _json_response(f"Session {named} closed", _CLOSED_HEADER, named)


def _kind(request: Input) -> Any:
    """Return what a request wants of sessions. None means that it is for the model: it is no JSON, or has a prompt."""
    try:
        body = fields.json_object(request)
    except RequestError:
        return None
    return None if body.keys() & {"inputs", "prompt", "messages"} else body.get(_KEY)


def _open_response(session: Session) -> Response:
    expires = datetime.fromtimestamp(session.expiration_ts, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return _json_response(f"Session {session.session_id} created", _HEADER, f"{session.session_id}; Expires={expires}")


def _json_response(result: str, header: str, value: str) -> Response:
    return Response(headers=[_JSON, (header, value)], data=encode({"result": result}))
