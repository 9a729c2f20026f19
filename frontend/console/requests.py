"""The last requests that have ended, for the pages of the console that show one of them.

Of a request there is what metrics, access log and traces know: its times, its tokens, how it ended. Its text is there
only if `log_prompts` has the server log texts.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Any

from msgspec.structs import replace

from frontend.observability.request_record import RequestRecord
from lmi_server.contract.texts.quoting import excerpt
from lmi_server.contract.texts.secrets import SECRETS

KEPT = 1000
PAGE = 50
_LONGEST = 256  # characters of an id, a route or a name
_PROMPT_BYTES = 2048

Row = dict[str, Any]


class RecentRequests:
    """The last thousand requests; the first since the start of the server has the number 1."""

    def __init__(self) -> None:
        self._records: deque[RequestRecord] = deque(maxlen=KEPT)
        self._added = 0

    def add(self, record: RequestRecord) -> None:
        """Keep a request that has just ended, in place of the oldest."""
        self._added += 1
        self._records.append(record if _is_short(record) else _shorten(record))

    def page(self, model: str, wanted: str, failed: bool, number: int) -> Row:
        """Return a page of the requests that match, the newest first; pages count from 0.

        They are those of a model ("": of all), with `wanted` in their id, and, if `failed`, without success.
        """
        found = [
            (self._added - age, record)
            for age, record in enumerate(reversed(self._records))
            if (not model or record.model == model)
            and (not wanted or wanted in record.id)
            and (not failed or record.code >= 400)
        ]
        pages = max(1, -(-len(found) // PAGE))
        here = min(number, pages - 1)
        offset = time.time() - time.monotonic()
        rows = [_row(each, record, offset) for each, record in islice(found, here * PAGE, (here + 1) * PAGE)]
        counts = {"kept": len(self._records), "ended": self._added, "matching": len(found)}
        return {**counts, "page": here, "pages": pages, "rows": rows}

    def details(self, number: int) -> Row | None:
        """Return one request with its stages; None if it is not kept any more, or has not been yet."""
        place = number - self._added + len(self._records) - 1
        if not 0 <= place < len(self._records):
            return None
        record = self._records[place]
        return {
            **_row(number, record, time.time() - time.monotonic()),
            "stages": _stages(record),
            "attempts": [[_ms(sent - record.arrived), _ms(lost - record.arrived)] for sent, lost in record.attempts],
            "client": record.client,
            "trace": record.trace_id,
            **_generation_row(record),
            "prompt": SECRETS.mask(record.prompt.decode(errors="replace")) if record.prompt else None,
        }


def _is_short(record: RequestRecord) -> bool:
    """Return whether all texts together are short: this runs for every request, and nearly always they are.

    The server itself makes the route, the label of the model and the trace id, which are short. The address of the
    client may be any text of X-Forwarded-For.
    """
    texts = f"{record.id}{record.error}{record.client}"
    if record.summary is not None:
        texts = f"{texts}{record.summary.finish_reason}{record.summary.adapter}"
    return len(texts) <= _LONGEST and len(record.prompt) <= _PROMPT_BYTES


def _shorten(record: RequestRecord) -> RequestRecord:
    """Return a record that holds no more of what a client or a worker says than is shown."""
    shorter = {name: excerpt(getattr(record, name), _LONGEST) for name in ("id", "error", "client")}
    summary = record.summary
    if summary is not None:
        told = {name: excerpt(getattr(summary, name), _LONGEST) for name in ("finish_reason", "adapter")}
        summary = replace(summary, **told)
    return replace(record, **shorter, summary=summary, prompt=record.prompt[:_PROMPT_BYTES])


def _row(number: int, record: RequestRecord, offset: float) -> Row:
    summary, first = record.summary, record.first_token_s
    return {
        "number": number,
        "id": excerpt(record.id, _LONGEST),
        "model": record.model,
        "route": record.route,
        "code": record.code,
        "error": record.error,
        "time": round(record.arrived + offset, 3),
        "duration": _ms(record.duration_s),
        "queue": _ms(record.queue_s) if record.sent else None,
        "ttft": None if first is None else _ms(first),
        "prompt_tokens": None if summary is None else summary.prompt_tokens,
        "output_tokens": None if summary is None else summary.output_tokens,
    }


def _generation_row(record: RequestRecord) -> Row:
    summary = record.summary
    if summary is None:
        return {}
    gaps = summary.output_tokens - summary.sequences
    return {
        "finish": excerpt(summary.finish_reason, _LONGEST),
        "adapter": excerpt(summary.adapter, _LONGEST),
        "cached_tokens": summary.cached_tokens,
        "sequences": summary.sequences,
        "token_gap": _ms(summary.decode_s / gaps) if gaps > 0 else None,
    }


def _stages(record: RequestRecord) -> Sequence[tuple[str, float, float]]:
    """Return what the request went through: name, beginning and length in milliseconds; together they are the whole."""
    ends = [("reading", record.queued or record.ended)]
    if record.sent:
        ends.append(("queue", record.sent))
        summary = record.summary
        if summary is None:
            ends.append(("model", record.first_byte))
        elif summary.prefill_s is None:
            ends.append(("generation", record.sent + summary.generate_s))
        else:
            ends.append(("prefill", record.sent + summary.prefill_s))
            ends.append(("decode", record.sent + summary.generate_s))
        ends.append(("sending", record.ended))
    stages, began = [], record.arrived
    for name, end in ends:
        reached = min(max(began, end), record.ended)  # the worker has a clock of its own
        stages.append((name, _ms(began - record.arrived), _ms(reached - began)))
        began = reached
    return stages


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
