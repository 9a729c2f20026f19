"""LMI's logs beside that of the server: access.log, model_metric.log and server_metric.log.

Each is a logger of its name. Its lines go to a file in the directory that is configured, otherwise to standard error
with the server's own. Files are written in threads of their own, as the server's log is, and rotated as in LMI.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, MutableMapping
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from frontend.http.clients import Receive, Scope, Send
from frontend.observability.metrics.catalogue import HISTOGRAMS, djl_response
from frontend.observability.metrics.recorded import HOST
from frontend.observability.request_record import RequestRecord
from frontend.observability.server_log import BackgroundLog, LineFormatter
from lmi_server.contract.errors import ConfigurationError
from lmi_server.contract.metrics import HISTOGRAM, Metric
from lmi_server.contract.texts.secrets import SECRETS

Application = Callable[[Scope, Receive, Send], Awaitable[None]]

_LOGGERS = {"access": "ACCESS_LOG", "model_metric": "model_metric", "server_metric": "server_metric"}
_NAMES = {row.key: row.djl_serving for row in HISTOGRAMS}
_FILE_FORMAT = LineFormatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S")
_FILE_BYTES = 10 << 20
_FILES = 5


@contextlib.contextmanager
def log_files(names: Collection[str], directory: Path | None) -> Iterator[None]:
    """Write the logs of `names`, to files in `directory` if there is one.

    Raises ConfigurationError if a file cannot be written.
    """
    with contextlib.ExitStack() as stack:
        for name in names:
            logger = logging.getLogger(_LOGGERS[name])
            logger.setLevel(logging.INFO)  # independent of the level of the server's own log
            if directory is not None:
                stack.enter_context(_file_log(logger, directory / f"{name}.log"))
        yield


@contextlib.contextmanager
def _file_log(logger: logging.Logger, path: Path) -> Iterator[None]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = RotatingFileHandler(path, maxBytes=_FILE_BYTES, backupCount=_FILES, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(
            f'log_dir = "{path.parent}": {error.strerror}; name a directory that the server may write to'
        ) from error
    handler.setFormatter(_FILE_FORMAT)
    logger.propagate = False
    log = BackgroundLog(logger, handler)
    log.start()
    try:
        yield
    finally:
        log.close()
        handler.close()
        logger.propagate = True


class MetricLog:
    """Writes metrics as LMI's lines, to the logs in `names`."""

    def __init__(self, names: Collection[str]) -> None:
        self.model = _line_writer("model_metric", names)
        self.server = _line_writer("server_metric", names)

    def request(self, model: str, record: RequestRecord) -> None:
        """Write the times of a request that a worker answered. `model` is the name without the version."""
        for key, seconds in (("queue", record.queue_s), ("duration", record.duration_s)):
            self.model(Metric(_NAMES[key], "Microseconds", round(seconds * 1e6), (("Model", model),), HISTOGRAM))

    def response(self, code: int) -> None:
        """Write that an answer with this status was sent."""
        name = djl_response(code)
        if name is not None:
            self.server(Metric(name, "Count", 1, (("Host", HOST),)))


def _line_writer(name: str, names: Collection[str]) -> Callable[[Metric], None]:
    if name not in names:
        return lambda metric: None
    logger = logging.getLogger(_LOGGERS[name])
    return lambda metric: logger.info("%s", metric)


class AccessLog:
    """Wraps an ASGI application, and writes a line for each answer when its last byte was sent.

    The line is LMI's: `/ip:port "METHOD path PROTOCOL" status milliseconds`. LMI's time ends with the headers.
    """

    def __init__(self, application: Application) -> None:
        self._application = application
        self._logger = logging.getLogger(_LOGGERS["access"])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = time.monotonic()
        status = 0

        async def send_and_note(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        line = _request_line(scope)  # before the application changes the path
        try:
            await self._application(scope, receive, send_and_note)
        finally:
            self._logger.info("%s %d %d", line, status, (time.monotonic() - began) * 1000)


def _request_line(scope: Scope) -> str:
    host, port = scope["client"] or ("", 0)
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    path = scope["raw_path"].decode("latin-1")
    query = f"?{SECRETS.mask_query(scope['query_string'].decode('latin-1'))}" if scope["query_string"] else ""
    target = f"{path}{query}".replace('"', "%22")  # a quotation mark would end the text in quotation marks
    return f'/{address} "{scope["method"]} {target} HTTP/{scope["http_version"]}"'
