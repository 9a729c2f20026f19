"""Fetches images, videos and sounds that requests name by URL, from public addresses alone, and limits their sizes.

Otherwise a request could make the server ask others of its own network, such as the metadata service of a cloud, which
answers with credentials. A connection is made to the very address that was checked. So neither a name that resolves to
another address the next time nor a redirect gets around the check, and no error tells which private ports are open.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pybase64
import requests
from PIL import UnidentifiedImageError
from requests.adapters import HTTPAdapter
from urllib3 import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.connection import HTTPConnection as PlainConnection
from urllib3.connection import HTTPSConnection as SecuredConnection
from urllib3.exceptions import NewConnectionError
from vllm.connections import HTTPConnection
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.media.connector import MEDIA_CONNECTOR_REGISTRY, MediaConnector
from vllm.multimodal.media.image import ImageMediaIO

from handlers.vllm.description import ANY_MEDIA, PUBLIC_MEDIA
from handlers.vllm.requests.rendering import MEDIA_SIZE
from lmi_server.contract.errors import PayloadTooLargeError
from lmi_server.media.budget import MediaBudget, current_budget
from lmi_server.media.images import FORMATS, open_image
from lmi_server.media.public_addresses import PrivateAddressError, connect_to_public, is_public


def _not_public() -> VLLMValidationError:
    return VLLMValidationError(
        "media are fetched from public addresses alone, and the URL leads to a private one; send a data: URL, "
        "or set option.allow_private_media=true",
        parameter="url",
    )


class _CheckedPlainConnection(PlainConnection):
    def _new_conn(self) -> socket.socket:
        return _public_socket(self)


class _CheckedSecuredConnection(SecuredConnection):
    def _new_conn(self) -> socket.socket:
        return _public_socket(self)


def _public_socket(connection: PlainConnection) -> socket.socket:
    place = (connection._dns_host, connection.port)
    try:
        return connect_to_public(place, connection.timeout, connection.source_address, connection.socket_options or ())
    except PrivateAddressError as error:
        raise _not_public() from error
    except OSError as error:
        raise NewConnectionError(connection, f"{connection.host} cannot be reached: {error}") from error


class _PlainPool(HTTPConnectionPool):
    ConnectionCls = _CheckedPlainConnection


class _SecuredPool(HTTPSConnectionPool):
    ConnectionCls = _CheckedSecuredConnection


class _CheckedAdapter(HTTPAdapter):
    def init_poolmanager(self, *arguments: Any, **keywords: Any) -> None:
        super().init_poolmanager(*arguments, **keywords)
        self.poolmanager.pool_classes_by_scheme = {"http": _PlainPool, "https": _SecuredPool}


class PublicConnection(HTTPConnection):
    """vLLM's HTTP clients, on checked connections and without proxies, which would connect in their place.

    `allows` says to which addresses they may connect.
    """

    def __init__(self, allows: Callable[[str], bool] = is_public) -> None:
        super().__init__()
        self._allows = allows
        self._session: requests.Session | None = None
        self._client: aiohttp.ClientSession | None = None

    def get_sync_client(self) -> requests.Session:
        if self._session is None:
            self._session = requests.Session()
            self._session.trust_env = False
            for scheme in ("http://", "https://"):
                self._session.mount(scheme, _CheckedAdapter())
        return self._session

    async def get_async_client(self) -> aiohttp.ClientSession:
        if self._client is None:
            connector = aiohttp.TCPConnector(socket_factory=self._check_socket)
            self._client = aiohttp.ClientSession(connector=connector)
        return self._client

    def _check_socket(self, address: Any) -> socket.socket:
        family, kind, protocol, _, target = address
        if not self._allows(target[0]):
            raise _not_public()
        return socket.socket(family, kind, protocol)


class _LimitedMedia:
    """Decodes one file as `media` does, if the request may have it.

    The head of an image says what it takes. vLLM itself limits each sound (VLLM_MAX_AUDIO_DECODE_BYTES) and the frames
    of each video, which count once they are decoded.
    """

    def __init__(self, media: Any) -> None:
        self._media = media
        self._budget = current_budget()
        if hasattr(media, "image_io"):  # by which a video reads its frames if they are sent one by one
            media.image_io = _LimitedMedia(media.image_io)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._media, name)

    def load_bytes(self, data: bytes) -> Any:
        is_image = isinstance(self._media, ImageMediaIO)
        if is_image:
            _check_image(data, self._budget)
        return self._count(self._media.load_bytes(data), is_image)

    def load_base64(self, media_type: str, data: str) -> Any:
        if isinstance(self._media, ImageMediaIO):
            return self.load_bytes(pybase64.b64decode(data, validate=True))
        return self._count(self._media.load_base64(media_type, data), media_type.lower() == "video/jpeg")

    def load_file(self, path: Path) -> Any:
        if isinstance(self._media, ImageMediaIO):
            return self.load_bytes(path.read_bytes())
        return self._count(self._media.load_file(path))

    def _count(self, loaded: Any, is_counted: bool = False) -> Any:
        decoded = getattr(loaded, "media", loaded)
        samples = decoded[0] if isinstance(decoded, tuple) else decoded
        if not is_counted and (size := getattr(samples, "nbytes", 0)):
            _take(self._budget, size)
        return loaded


def _check_image(data: bytes, budget: MediaBudget) -> None:
    try:
        open_image(data, budget)
    except PayloadTooLargeError as error:
        raise VLLMValidationError(error.message, parameter=MEDIA_SIZE) from error
    except UnidentifiedImageError as error:
        raise VLLMValidationError(
            f"the file is no image of a known format; send one in {', '.join(FORMATS)}", parameter="image"
        ) from error


def _take(budget: MediaBudget, size: int) -> None:
    try:
        budget.take(size, f"a sound or a video of {size} bytes")
    except PayloadTooLargeError as error:
        raise VLLMValidationError(error.message, parameter=MEDIA_SIZE) from error


_CONNECTION = PublicConnection()


@MEDIA_CONNECTOR_REGISTRY.register(ANY_MEDIA)
class AnyMediaConnector(MediaConnector):
    """vLLM's own, which fetches from any address; what it refuses is an error of the request.

    What the media of a request take when they are decoded counts together.
    """

    def load_from_url(self, url: str, media_io: Any, **keywords: Any) -> Any:
        return super().load_from_url(url, _LimitedMedia(media_io), **keywords)

    async def load_from_url_async(self, url: str, media_io: Any, **keywords: Any) -> Any:
        return await super().load_from_url_async(url, _LimitedMedia(media_io), **keywords)

    def _assert_url_in_allowed_media_domains(self, url_spec: Any) -> None:
        try:
            super()._assert_url_in_allowed_media_domains(url_spec)
        except ValueError as error:
            raise VLLMValidationError(str(error), parameter="url") from error


@MEDIA_CONNECTOR_REGISTRY.register(PUBLIC_MEDIA)
class PublicMediaConnector(AnyMediaConnector):
    """Fetches from public addresses."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **{**keywords, "connection": _CONNECTION})
