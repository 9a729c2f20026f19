"""What is known of an inference request once its answer has ended, for metrics, the access log and traces."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from lmi_server.contract.protocol import Summary

FAILED = 424
"""From this status on, the server or its model failed; the client may also have gone (CLIENT_GONE)."""

CLIENT_GONE = 499
"""The status, in the metrics alone, of a request whose client went away before its answer."""


class RequestRecord(msgspec.Struct, gc=False):
    """One request. Times are those of time.monotonic(); 0.0 stands for what a refused request never reached.

    `code` is the status under which it counts. `model` is the label of the model, "" for none; `client` is an address,
    "" on a Unix socket; `trace_id` is that of the client's trace or of the server's own, "" for none; `error` is the
    kind of an error. `attempts` are the times at which workers got the request and lost it again. `prompt` is the
    beginning of the body, if prompts are logged.
    """

    code: int
    arrived: float
    ended: float
    id: str
    model: str
    route: str
    client: str
    queued: float = 0.0
    sent: float = 0.0
    first_byte: float = 0.0
    summary: Summary | None = None
    trace_id: str = ""
    error: str = ""
    attempts: Sequence[tuple[float, float]] = ()
    prompt: bytes = b""

    @property
    def queue_s(self) -> float:
        return self.sent - self.queued

    @property
    def first_byte_s(self) -> float:
        return self.first_byte - self.arrived

    @property
    def duration_s(self) -> float:
        return self.ended - self.arrived

    @property
    def first_token_s(self) -> float | None:
        """The time from the arrival to the first token; None if there was none, or if it is unknown when it came."""
        summary = self.summary
        if summary is None or summary.prefill_s is None:
            return None
        return self.sent - self.arrived + summary.prefill_s
