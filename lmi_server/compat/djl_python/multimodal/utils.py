"""Images of URLs, and prompts with a place for an image."""

from __future__ import annotations

import base64
from typing import Any

from djl_python.optional_packages import needs
from lmi_server.contract.texts.quoting import excerpt
from lmi_server.media.fetching import fetch_bytes
from lmi_server.media.images import open_image
from lmi_server.media.public_addresses import allows_private


def get_image_text_prompt(prompt_text: str) -> str:
    """Return a prompt with a place for an image."""
    return f"<image>\n{prompt_text}"


def load_image_from_base64(image: str | bytes) -> Any:
    """Return the PIL image that is encoded as base64."""
    return _image(base64.b64decode(image))


def fetch_image_from_url(image_url: str) -> Any:
    """Return the PIL image at a URL."""
    return _image(_fetch(image_url))


def fetch_image(image_url: str) -> Any:
    """Return the PIL image of a URL: `http`, `https`, or `data:image/...` with the image in base64.

    Raises ValueError for other URLs, and for private addresses unless option.allow_private_media=true allows them.
    """
    if image_url.startswith(("http://", "https://")):
        return fetch_image_from_url(image_url)
    if image_url.startswith("data:image"):
        return load_image_from_base64(image_url.partition(",")[2])
    raise ValueError(f"the URL of the image is '{excerpt(image_url, 40)}'; allowed: http://, https://, data:image/...")


def encode_image_base64_from_url(image_url: str) -> str:
    """Return the image at a URL as base64."""
    return base64.b64encode(_fetch(image_url)).decode()


def _fetch(image_url: str) -> bytes:
    if not image_url.startswith(("http://", "https://")):
        raise ValueError(f"the URL of the image is '{excerpt(image_url, 40)}'; allowed: http://, https://")
    return fetch_bytes(image_url, private=allows_private())


def _image(data: bytes) -> Any:
    with needs("Pillow", "images"):
        return open_image(data)
