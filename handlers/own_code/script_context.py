"""The context of SageMaker's model servers, which functions of a script may take as their last parameter."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from djl_python.properties import Properties

_CONTENT_TYPE = "content-type"
_UNITS = {
    "ms": "Milliseconds",
    "s": "Seconds",
    "B": "Bytes",
    "kB": "Kilobytes",
    "MB": "Megabytes",
    "GB": "Gigabytes",
    "count": "Count",
    "percent": "Percent",
}
_OF_TIME, _OF_SIZE = ("ms", "s"), ("B", "kB", "MB", "GB")


class RequestProcessor:
    """The headers of one request, and what functions say of its answer. `phrase` is the reason phrase."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        self._headers = Properties(headers)
        self._answer = Properties()
        self.status = 200
        self.phrase = ""

    def get_request_property(self, key: str) -> str | None:
        """Return a header of the request, whatever the case of its name."""
        value: str | None = self._headers.get(key)
        return value

    def get_request_properties(self) -> dict[str, str]:
        """Return the headers with the names that the client wrote; they are found in any case."""
        return self._headers

    def report_status(self, code: int, reason_phrase: str | None = None) -> None:
        """Set the status of the answer."""
        self.status, self.phrase = code, reason_phrase or ""

    def get_response_status_code(self) -> int:
        return self.status

    def get_response_status_phrase(self) -> str:
        return self.phrase

    def add_response_property(self, key: str, value: str) -> None:
        """Set a header of the answer."""
        self._answer[key] = value

    def get_response_headers(self) -> dict[str, str]:
        return self._answer

    def get_response_header(self, key: str) -> str | None:
        value: str | None = self._answer.get(key)
        return value


class Metrics:
    """Reports values as the server reads them from the output of a model: they become metrics of it."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name

    def add_counter(self, name: str, value: float, idx: int | None = None, dimensions: Any = None) -> None:
        """Report a number of events."""
        self._report(name, value, "count", dimensions)

    def add_time(
        self, name: str, value: float, idx: int | None = None, unit: str = "ms", dimensions: Any = None
    ) -> None:
        """Report a time. Raises ValueError if the unit is neither ms nor s."""
        self._report(name, value, _check_unit(unit, _OF_TIME), dimensions)

    def add_size(
        self, name: str, value: float, idx: int | None = None, unit: str = "MB", dimensions: Any = None
    ) -> None:
        """Report a size. Raises ValueError if the unit is not B, kB, MB or GB."""
        self._report(name, value, _check_unit(unit, _OF_SIZE), dimensions)

    def add_percent(self, name: str, value: float, idx: int | None = None, dimensions: Any = None) -> None:
        """Report a share of a hundred."""
        self._report(name, value, "percent", dimensions)

    def add_error(self, name: str, value: Any, dimensions: Any = None) -> None:
        """Report a text, which is a line of the log."""
        self._report(name, value, "Error", dimensions)

    def add_metric(
        self, name: str, value: float, idx: int | None = None, unit: str | None = None, dimensions: Any = None
    ) -> None:
        """Report a value of any unit."""
        self._report(name, value, unit or "count", dimensions)

    def _report(self, name: str, value: Any, unit: str, dimensions: Iterable[Any] | None) -> None:
        pairs = ",".join(map(str, (*(dimensions or ()), f"ModelName:{self._model_name}")))
        line = f"[METRICS]{name}.{_UNITS.get(unit, unit)}:{value}|#{pairs}"
        sys.stdout.write(" ".join(line.splitlines()) + "\n")
        sys.stdout.flush()


def _check_unit(unit: str, allowed: tuple[str, ...]) -> str:
    if unit not in allowed:
        raise ValueError(f"unit {unit!r} is not allowed; allowed: {', '.join(allowed)}")
    return unit


class Context:
    """What a function may take as its last parameter, by the names of Multi Model Server. Each call has a new one.

    A call has one request, with index 0.
    """

    def __init__(self, system_properties: Mapping[str, Any], headers: Mapping[str, str], request_id: str) -> None:
        self.system_properties = dict(system_properties)
        self.model_name = os.path.basename(str(system_properties["model_dir"]))
        self.manifest: dict[str, Any] = {}
        self.request_ids = {0: request_id}
        self.request_processor = [RequestProcessor(headers)]
        self.metrics = Metrics(self.model_name)

    def get_request_id(self, idx: int = 0) -> str | None:
        """Return the id of the request: the client's, or the server's own."""
        return self.request_ids.get(idx)

    def get_request_header(self, idx: int, key: str) -> str | None:
        """Return a header of the request, whatever the case of its name."""
        return self.request_processor[idx].get_request_property(key)

    def get_all_request_header(self, idx: int) -> dict[str, str]:
        """Return the headers with the names that the client wrote; they are found in any case."""
        return self.request_processor[idx].get_request_properties()

    def set_response_content_type(self, idx: int, value: str) -> None:
        self.set_response_header(idx, _CONTENT_TYPE, value)

    def get_response_content_type(self, idx: int) -> str | None:
        return self.request_processor[idx].get_response_header(_CONTENT_TYPE)

    def set_response_header(self, idx: int, key: str, value: str) -> None:
        """Set a header of the answer."""
        self.request_processor[idx].add_response_property(key, value)

    def get_response_headers(self, idx: int) -> dict[str, str]:
        return self.request_processor[idx].get_response_headers()

    def set_response_status(self, code: int = 200, phrase: str = "", idx: int = 0) -> None:
        """Set status and reason phrase of the answer."""
        self.request_processor[idx].report_status(code, phrase)

    def set_all_response_status(self, code: int = 200, phrase: str = "") -> None:
        """Set status and reason phrase of the answer to every request of the call."""
        for processor in self.request_processor:
            processor.report_status(code, phrase)

    def get_response_status(self, idx: int) -> tuple[int, str]:
        processor = self.request_processor[idx]
        return processor.status, processor.phrase
