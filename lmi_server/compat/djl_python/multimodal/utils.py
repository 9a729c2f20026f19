"""Images of URLs, and prompts with a place for an image."""

from __future__ import annotations

import base64
from http.client import HTTPConnection, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.error import URLError
from urllib.request import (
    FTPHandler,
    HTTPHandler,
    HTTPSHandler,
    OpenerDirector,
    ProxyHandler,
    Request,
    build_opener,
)

from djl_python.optional_packages import needs
from lmi_server.machine.public_addresses import allows_private, connect_to_public
from lmi_server.media.images import open_image

_TIMEOUT_S = 60


def get_image_text_prompt(prompt_text: str) -> str:
    """Return a prompt with a place for an image."""
    return f"<image>\n{prompt_text}"


def load_image_from_base64(image: str | bytes) -> Any:
    """Return the PIL image that is encoded as base64."""
    return _image(base64.b64decode(image))


def fetch_image_from_url(image_url: str) -> Any:
    """Return the PIL image at a URL."""
    return _image(_fetched(image_url))


def fetch_image(image_url: str) -> Any:
    """Return the PIL image of a URL: `http`, `https`, or `data:image/...` with the image in base64.

    Raises ValueError for other URLs, and for those that lead to a private address, unless
    option.allow_private_media=true allows them.
    """
    if image_url.startswith(("http://", "https://")):
        return fetch_image_from_url(image_url)
    if image_url.startswith("data:image"):
        return load_image_from_base64(image_url.partition(",")[2])
    raise ValueError(f"the URL of the image is {image_url[:40]!r}; allowed: http://, https://, data:image/...")


def encode_image_base64_from_url(image_url: str) -> str:
    """Return the image at a URL as base64."""
    return base64.b64encode(_fetched(image_url)).decode()


def _fetched(image_url: str) -> bytes:
    if not image_url.startswith(("http://", "https://")):
        raise ValueError(f"the URL of the image is {image_url[:40]!r}; allowed: http://, https://")
    with _opener().open(image_url, timeout=_TIMEOUT_S) as answer:
        data: bytes = answer.read()
        return data


def _opener() -> OpenerDirector:
    """Return what opens URLs. A proxy, or FTP behind a redirect, would connect without the check of the address."""
    if allows_private():
        return build_opener()
    return build_opener(ProxyHandler({}), _PublicHTTP(), _PublicHTTPS(), _NoFtp())


class _PublicHTTPConnection(HTTPConnection):
    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._create_connection = connect_to_public


class _PublicHTTPSConnection(HTTPSConnection):
    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._create_connection = connect_to_public


class _PublicHTTP(HTTPHandler):
    def http_open(self, req: Request) -> HTTPResponse:
        return self.do_open(_PublicHTTPConnection, req)


class _PublicHTTPS(HTTPSHandler):
    def https_open(self, req: Request) -> HTTPResponse:
        return self.do_open(_PublicHTTPSConnection, req)


class _NoFtp(FTPHandler):
    def ftp_open(self, req: Request) -> Any:
        raise URLError("images are fetched by http and https alone")


def _image(data: bytes) -> Any:
    with needs("Pillow", "images"):
        return open_image(data)
