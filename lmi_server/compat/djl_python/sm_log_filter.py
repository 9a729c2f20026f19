"""The filter of log records that SageMaker counts, for the log handlers of user code."""

from __future__ import annotations

import copy
import logging
import sys
from collections import defaultdict
from typing import ClassVar

from djl_python import __version__

logger = logging.getLogger(__name__)


class SMLogFilter(logging.Filter):
    """Keeps records such as `UserScriptError: model load: 1 Count` and rewrites them as metrics.

    The example becomes `UserScriptError.Count:1|#DJLServing:0.36.0,ModelLoad:1 Count`; the first number counts the
    records of that metric in this process.
    """

    sm_log_markers: ClassVar[list[str]] = ["ModelServerError", "UserScriptError", "SysHealth", "ModelServerTelemetry"]
    counter: ClassVar[defaultdict[str, int]] = defaultdict(int)

    def filter(self, record: logging.LogRecord) -> bool | logging.LogRecord:  # type: ignore[override, unused-ignore]
        """Return the rewritten record; False for one without a mark, and with a warning for one of another form."""
        text = record.msg
        if not isinstance(text, str) or text.partition(":")[0] not in self.sm_log_markers:
            return False
        try:
            mark, name, metric = (part.strip() for part in text.split(":"))
            value, unit = metric.split(" ")
        except ValueError:
            logger.warning("%r is no metric; log MARK: name: value unit", text)
            return False
        key = "".join(word[:1].upper() + word[1:] for word in name.split(" "))
        if sys.version_info >= (3, 12):  # older versions of logging keep the record that they pass to a filter
            record = copy.copy(record)
        record.msg = f"{mark}.Count:{self.count(key)}|#DJLServing:{__version__},{key}:{value} {unit}"
        return record

    def count(self, key: str) -> int:
        """Count one more record of a metric."""
        self.counter[key] += 1
        return self.counter[key]
