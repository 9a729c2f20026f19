"""Stateful sessions of a model that generates text: they are opened and closed by requests, and named by a header."""

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
    """Answers what is about sessions; every other request only has its session checked."""

    def __init__(self, options: ModelOptions) -> None:
        names = ("sessions_path", "sessions_expiration", "sessions_s3url")
        self._manager = SessionManager({name: getattr(options, name) for name in names})

    @staticmethod
    def concerns(request: Input) -> bool:
        """Tell whether a request names a session, or may open one."""
        return _HEADER.lower() in request.properties or _KEY.encode() in request.body()

    def save(self) -> None:
        """Save every session where the options say so."""
        save_sessions()

    def answer(self, request: Input) -> Response | None:
        """Return the answer to a request that opens or closes a session; None where it is one for the model.

        May wait for files and for S3. Raises RequestError where its session is not known, or it asks for something
        else, HandlerError where sessions cannot be kept.
        """
        try:
            return self._answer(request)
        except OSError as error:
            raise HandlerError(f"the session cannot be kept: {error}") from error

    def _answer(self, request: Input) -> Response | None:
        named = request.properties.get(_HEADER.lower())
        if _KEY.encode() not in request.body():
            self._check(named)
            return None
        kind = _kind(request)
        if kind == "NEW_SESSION":
            return _opened(self._manager.create_session())
        if kind == "CLOSE":
            return self._close(named)
        if kind is not None:
            raise fields.not_allowed(_KEY, kind, "send NEW_SESSION or CLOSE")
        self._check(named)
        return None

    def _check(self, named: str | None) -> None:
        """Raise RequestError where a session is named that is not there. One that has expired passes, as with LMI."""
        try:
            self._manager.get_session(named)
        except ValueError as error:
            raise RequestError(str(error)) from None

    def _close(self, named: str | None) -> Response:
        if not named:
            raise RequestError(f"{_HEADER} is missing; send the id of the session that is to be closed")
        try:
            self._manager.close_session(named)
        except ValueError as error:
            raise RequestError(str(error)) from None
        return _told(f"Session {named} closed", _CLOSED_HEADER, named)


def _kind(request: Input) -> Any:
    """Return what a request wants of sessions; None where it is no JSON, or has a prompt as well: it is the model's."""
    try:
        body = fields.json_object(request)
    except RequestError:
        return None
    return None if body.keys() & {"inputs", "prompt", "messages"} else body.get(_KEY)


def _opened(session: Session) -> Response:
    expires = datetime.fromtimestamp(session.expiration_ts, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return _told(f"Session {session.session_id} created", _HEADER, f"{session.session_id}; Expires={expires}")


def _told(result: str, header: str, value: str) -> Response:
    return Response(headers=[_JSON, (header, value)], data=encode({"result": result}))
