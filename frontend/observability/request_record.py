"""What is known of an inference request once its answer has ended, for metrics, logs and traces."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from lmi_server.contract.protocol import Summary

FAILED = 424
"""From this status on, the server or its model failed; the client may also have gone (CLIENT_GONE)."""


class RequestRecord(msgspec.Struct, gc=False):
    """One request that a worker answered. Times are those of time.monotonic().

    `code` is the status under which it counts, `trace_id` that of the client's trace, "" for none.
    """

    code: int
    arrived: float
    queued: float
    sent: float
    first_byte: float
    ended: float
    summary: Summary | None
    trace_id: str

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
        """Return the time from the arrival to the first token; None if there was none, or nobody knows when it came."""
        summary = self.summary
        if summary is None or summary.prefill_s is None:
            return None
        return self.sent - self.arrived + summary.prefill_s


class EndedRequest(RequestRecord, gc=False):
    """A record with what traces show beside.

    `model` is the label of the model, "" for none; `client` is an address, "" on a Unix socket; `error` is the kind of
    an error. `attempts` are the times at which workers got it and lost it again.
    """

    id: str
    model: str
    route: str
    client: str
    error: str = ""
    attempts: Sequence[tuple[float, float]] = ()
