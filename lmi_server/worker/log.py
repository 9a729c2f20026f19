"""The log of a worker: records on its standard error, where the server reads them line by line."""

from __future__ import annotations

import logging
import sys

from lmi_server.contract.metrics import MARK
from lmi_server.contract.quoting import LONGEST_RECORD, as_record, shorten


class RecordFormatter(logging.Formatter):
    """Writes each record so that only its first line begins like one, and none holds a metric by accident.

    Messages and exceptions quote requests: without this a client could write lines of the log, and metrics. A metric is
    what code logs with the mark in front of its own format: it comes without level and name then, as it is printed.
    """

    def __init__(self) -> None:
        super().__init__("%(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if isinstance(record.msg, str) and record.msg.startswith(MARK):
            text = text[text.index(MARK) :]
        return as_record(shorten(text, LONGEST_RECORD))


def log_to_stderr() -> None:
    """Have the root logger write to standard error from INFO on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(RecordFormatter())
    logging.basicConfig(handlers=[handler], level=logging.INFO)
