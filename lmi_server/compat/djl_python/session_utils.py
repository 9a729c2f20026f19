"""Answers to requests that open and close a session, for code with sessions of its own."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from djl_python.async_utils import create_non_stream_output
from djl_python.inputs import Input
from djl_python.outputs import Output
from djl_python.session_manager import Session, SessionManager

HEADER_SAGEMAKER_SESSION_ID = "X-Amzn-SageMaker-Session-Id"
HEADER_SAGEMAKER_CLOSED_SESSION_ID = "X-Amzn-SageMaker-Closed-Session-Id"
_FAILED = 424


async def create_session(request: tuple[SessionManager, Input]) -> dict[str, Any]:
    """Open a session; return what `session_non_stream_output_formatter` takes."""
    try:
        session = request[0].create_session()
    except OSError as error:
        return {"error": f"Failed to create session: {error}", "code": _FAILED}
    expires = datetime.fromtimestamp(session.expiration_ts, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    headers = {HEADER_SAGEMAKER_SESSION_ID: f"{session.session_id}; Expires={expires}"}
    return {"data": {"result": f"Session {session.session_id} created"}, "properties": headers}


async def close_session(request: tuple[SessionManager, Input]) -> dict[str, Any]:
    """Close the session that a request names; return what `session_non_stream_output_formatter` takes."""
    manager, inputs = request
    session_id = inputs.get_property(HEADER_SAGEMAKER_SESSION_ID)
    try:
        manager.close_session(session_id)
    except (OSError, ValueError) as error:
        return {"error": f"Failed to close session: {error}", "code": _FAILED}
    headers = {HEADER_SAGEMAKER_CLOSED_SESSION_ID: str(session_id)}
    return {"data": {"result": f"Session {session_id} closed"}, "properties": headers}


def get_session(session_manager: SessionManager | None, request: Input) -> Session | None:
    """Return the session that a request names. Raises RuntimeError if it names one and there are no sessions."""
    session_id = request.get_property(HEADER_SAGEMAKER_SESSION_ID)
    if session_manager is not None:
        return session_manager.get_session(session_id)
    if session_id is not None:
        raise RuntimeError(f"{HEADER_SAGEMAKER_SESSION_ID} names a session, but sessions are not enabled")
    return None


def session_non_stream_output_formatter(response: Mapping[str, Any], **_: Any) -> Output:
    """Return the Output for the result of `create_session` or `close_session`."""
    if "error" in response:
        return create_non_stream_output("", error=response["error"], code=response["code"])
    return create_non_stream_output(response["data"], properties=response.get("properties"))
