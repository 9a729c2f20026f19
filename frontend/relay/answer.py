"""The way of an answer from the reply slot of its job to the client."""

from __future__ import annotations

from collections.abc import Mapping

from frontend.http.clients import shown_answer, shown_error, shown_text
from frontend.observability.request_record import CLIENT_GONE
from frontend.relay.request import RelayedRequest
from lmi_server.contract.errors import LmiServerError
from lmi_server.contract.protocol import CANCELLED, End, Error, Head, Reply
from lmi_server.dialects.errors import error_event, error_reply
from lmi_server.supervisor.job import Job

Statuses = Mapping[type[LmiServerError], int]


async def send_whole(request: RelayedRequest, terminal: Reply | End | Error | None, statuses: Statuses) -> int:
    """Send an answer that came at once; return its status."""
    if isinstance(terminal, Reply):
        data, reason = terminal.data, terminal.reason
        if terminal.message:
            data, reason = shown_answer(data, terminal.message, request.scope), shown_text(reason, request.scope)
        await request.response.whole(terminal.status, terminal.headers, data, reason)
        return terminal.status
    assert isinstance(terminal, Error), "a stream has a head before its end"
    if terminal.kind == CANCELLED:
        return CLIENT_GONE
    status, headers, data = reply_with_error(request, terminal.exception(), statuses)
    await request.response.whole(status, headers, data)
    return status


async def relay_stream(request: RelayedRequest, job: Job, head: Head, statuses: Statuses) -> int:
    """Send a stream as it arrives; return its status."""
    reply, response = job.reply, request.response
    await response.begin(head)
    while True:
        terminal = reply.terminal
        data = reply.take()
        if terminal is not None and not reply.unread:
            if isinstance(terminal, End) and terminal.message:
                data = shown_answer(data, terminal.message, request.scope)
            await response.end(data + _ending(request, head, terminal))
            return _status_of_end(request.route, terminal, statuses)
        if data:
            await response.chunk(data)
        if reply.is_held:
            job.release()
        await reply.wait()


def reply_with_error(
    request: RelayedRequest, error: LmiServerError, statuses: Statuses
) -> tuple[int, list[tuple[str, str]], bytes]:
    """Return status, headers and body of an error as the client of this request may read it."""
    return error_reply(request.route, shown_error(error, request.scope), statuses, request.request_id)


def _status_of_end(route: str, terminal: Reply | End | Error, statuses: Statuses) -> int:
    """Return the status under which the metrics count a stream; an error that ended it decides."""
    if not isinstance(terminal, Error):
        return terminal.status
    return CLIENT_GONE if terminal.kind == CANCELLED else error_reply(route, terminal.exception(), statuses)[0]


def _ending(request: RelayedRequest, head: Head, terminal: Reply | End | Error) -> bytes:
    """Return the bytes after the last chunk of a stream: an error event if an error ended it, otherwise nothing."""
    if not isinstance(terminal, Error):
        return b""
    content_type = next((value for name, value in head.headers if name == "content-type"), "")
    error = shown_error(terminal.exception(), request.scope)
    return error_event(request.route, content_type, error, request.request_id)
