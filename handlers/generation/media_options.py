"""The options of handlers that fetch the URLs of requests; importable without any engine."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator

from lmi_server.configuration.declaration import Allowed
from lmi_server.configuration.options import ModelOptions, comma_separated
from lmi_server.configuration.references import FOR_OPERATOR, NAMES_NOTHING

_HOST = re.compile(r"[^][\s/*?#@:]+|[0-9a-fA-F.]*(:[0-9a-fA-F.]*){2,}")  # a name or an address, also of IPv6


def _hosts(hosts: tuple[str, ...]) -> tuple[str, ...]:
    """Return the hosts. Raises ValueError for what no URL has as its host: a URL, a pattern, a host with its port."""
    if not all(map(_HOST.fullmatch, hosts)):
        raise ValueError("not a host")
    return hosts


Hosts = Annotated[
    tuple[str, ...],
    BeforeValidator(comma_separated),
    AfterValidator(_hosts),
    Allowed("hosts separated by commas, such as images.example.com, with neither scheme, port, path nor pattern"),
]


class MediaOptions(ModelOptions):
    """Keys of serving.properties for images and other media in requests."""

    allowed_media_domains: Annotated[Hosts, NAMES_NOTHING] = ()
    """Hosts from which URLs in requests may bring images and other media; if not set, any public."""
    allow_private_media: Annotated[bool, FOR_OPERATOR] = False
    """Fetch media from private addresses too, such as those of the server's own network."""
