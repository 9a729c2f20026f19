"""The log of a worker: records on its standard error, where the server reads them line by line."""

from __future__ import annotations

import logging
import sys
import threading
from typing import Any

from lmi_server.contract.metrics import MARK
from lmi_server.contract.texts.quoting import LONGEST_RECORD, as_record, shorten
from lmi_server.worker.exception_text import exception_text

logger = logging.getLogger(__name__)


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

    def formatException(self, ei: Any) -> str:  # noqa: N802 - the name is that of logging
        try:
            return exception_text(ei[1])
        except BaseException:  # noqa: BLE001 - an exception of the user's code may have any attributes
            return f"{type.__repr__(ei[0]):.500}: its traceback cannot be shown"


def log_to_stderr() -> None:
    """Have the root logger write to standard error from INFO on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(RecordFormatter())
    logging.basicConfig(handlers=[handler], level=logging.INFO)
    _log_what_python_prints()


def _log_what_python_prints() -> None:
    """Have warnings, and exceptions that nothing catches, become records: both may quote a request."""
    logging.captureWarnings(True)
    threading.excepthook = _log_end_of_thread
    sys.unraisablehook = _log_unraisable
    sys.excepthook = _log_end_of_process


def _log_end_of_thread(ended: threading.ExceptHookArgs) -> None:
    if ended.exc_type is SystemExit:  # as Python does
        return
    name = "" if ended.thread is None else ended.thread.name
    _log_exception(f"the thread {name} ended", ended.exc_value)


def _log_unraisable(found: Any) -> None:
    _log_exception(f"{found.err_msg or 'an exception was ignored'}: {found.object!r}", found.exc_value)


def _log_end_of_process(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    _log_exception("the process ends", error)


def _log_exception(what: str, error: BaseException | None) -> None:
    details = None if error is None else (type(error), error, error.__traceback__)
    logger.error("%s", what, exc_info=details)
