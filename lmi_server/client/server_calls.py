"""What commands ask of a running server: each failure is a message of one line."""

from __future__ import annotations

import json
import re
import ssl
from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from http.client import HTTPException, HTTPResponse
from typing import Annotated, Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request

import typer

from lmi_server.client.bounded_requests import TooLargeAnswerError, open_within, read_whole
from lmi_server.contract.errors import ConfigurationError
from lmi_server.contract.texts.quoting import excerpt, shorten

DEFAULT_URL = "http://127.0.0.1:8080"
Headers = Annotated[list[str] | None, typer.Option(help="A header of each request, 'name: value'.")]
"""The option --header of commands."""
_HEADER_NAME = re.compile(r"[!#$%&'*+.^`|~\w-]+", re.ASCII)
_HEADER_VALUE = re.compile(r"[\t -~\xa0-\xff]*")
_PATH = re.compile(r"[!-~]*")
_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? ([-+.\deE]*\d|NaN|[-+]Inf)(?: \d+)?")


class UnreachableError(ConfigurationError):
    """A server cannot be reached, or does not answer in time."""


class ServerCalls:
    """The server at `url`, such as http://127.0.0.1:8080; each request has `headers`.

    Every call raises UnreachableError if the server cannot be reached, and ConfigurationError if it refuses. Raises the
    latter if `url` is none.
    """

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        host, port, prefix, tls = address(url)
        shown = f"[{host}]" if ":" in host else host
        self.url = f"{'https' if tls else 'http'}://{shown}:{port}{prefix}"
        self._headers = dict(headers)

    def json(self, method: str, path: str, timeout_s: float | None) -> Any:
        """Return what the server answers, as JSON, within `timeout_s`; None waits for as long as it takes."""
        data = self.data(method, path, timeout_s)
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            raise ConfigurationError(f"{self.url}{path} does not answer in JSON; is it lmi-server?") from error

    def text(self, path: str, timeout_s: float) -> str:
        """Return the text at `path`."""
        return self.data("GET", path, timeout_s).decode("utf-8", "replace")

    def data(self, method: str, path: str, timeout_s: float | None, body: Any = None) -> bytes:
        """Return the whole answer, of at most 64 MiB; see `json` and `open`."""
        with self.open(method, path, timeout_s, body) as answer:
            return self._read(answer)

    def open(self, method: str, path: str, timeout_s: float | None, body: Any = None) -> HTTPResponse:
        """Return the answer, which is still to be read; `body` is sent as JSON, if there is one."""
        data = None if body is None else json.dumps(body).encode()
        headers = {**self._headers, **({} if data is None else {"content-type": "application/json"})}
        request = Request(f"{self.url}{path}", data, headers, method=method)
        try:
            return open_within(timeout_s, request)
        except HTTPError as error:
            with error:
                message = error_message(self._read(error)) or _on_one_line(f"{self.url}{path}: {error}")
                raise ConfigurationError(f"{message}{remedy(error)}") from error
        except (OSError, HTTPException) as error:
            raise UnreachableError(self._failure(error)) from error

    def _read(self, answer: HTTPResponse | HTTPError) -> bytes:
        try:
            return read_whole(answer)
        except TimeoutError as error:
            raise UnreachableError(self._failure(error)) from error
        except TooLargeAnswerError as error:
            raise ConfigurationError(f"{self.url} {error}; is it lmi-server?") from error
        except (OSError, HTTPException) as error:
            raise ConfigurationError(self._failure(error)) from error

    def _failure(self, error: Exception) -> str:
        reason = error.reason if isinstance(error, URLError) else error
        return _on_one_line(f"{self.url} does not answer: {reason}")


def address(url: str) -> tuple[str, int, str, ssl.SSLContext | None]:
    """Return host, port, path and the TLS of a URL. Raises ConfigurationError if it is not http or https."""
    try:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        port = parts.port
        (parts.hostname or "").encode("idna")
    except ValueError as error:
        raise ConfigurationError(f"{url} is no URL: {error}; allowed: http://HOST:PORT, https://HOST:PORT") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or not _PATH.fullmatch(parts.path):
        raise ConfigurationError(f"{url} is no URL of a server; allowed: http://HOST:PORT, https://HOST:PORT")
    tls = ssl.create_default_context() if parts.scheme == "https" else None
    return parts.hostname, port or (443 if tls else 80), parts.path.rstrip("/"), tls


def parse_headers(headers: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return names and values of `name: value`. Raises ConfigurationError if one is none that HTTP can send."""
    pairs = [header.partition(":") for header in headers]
    given = tuple((name.strip(), value.strip()) for name, _, value in pairs)
    for (_, separator, _), (name, value) in zip(pairs, given, strict=True):
        if not (separator and _HEADER_NAME.fullmatch(name)):
            raise ConfigurationError(f'--header "{excerpt(name)}" is not allowed; allowed: "name: value"')
        if not _HEADER_VALUE.fullmatch(value):  # which may be a key: the message does not have it
            raise ConfigurationError(f'the value of --header "{name}" is not allowed; allowed: one line in Latin-1')
    return given


def error_message(body: bytes) -> str:
    """Return the message of an error in LMI's or OpenAI's form, on one line; the body itself in another form."""
    try:
        found = json.loads(body)
        text = str(found["message"] if "message" in found else found["error"]["message"])
    except (ValueError, KeyError, TypeError, RecursionError):
        text = body.decode("utf-8", "replace")
    return _on_one_line(text)


def _on_one_line(text: str) -> str:
    return shorten(re.sub(r"\s+", " ", text).strip())


def remedy(error: Exception) -> str:
    """Return how to send a key if the server asks for one, otherwise nothing."""
    wants_key = isinstance(error, HTTPError) and error.code == HTTPStatus.UNAUTHORIZED
    return "; --header 'x-api-key: KEY' sends a key" if wants_key else ""


def samples_in(lines: Iterable[str]) -> Iterable[tuple[str, str, float]]:
    """Yield the name, the labels as they are written, and the value of each sample."""
    for line in lines:
        found = None if line.startswith("#") else _SAMPLE.fullmatch(line)
        if found is not None:
            yield found[1], found[2] or "", float(found[3])


def increase(before: Mapping[str, float], after: Mapping[str, float], key: str) -> float | None:
    """Return by how much a counter grew; from zero if it is new, or the server has started again."""
    if key not in after:
        return None
    grown = after[key] - before.get(key, 0.0)
    return after[key] if grown < 0 else grown
