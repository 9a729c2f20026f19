"""The options of handlers that fetch the URLs of requests; importable without any engine."""

from __future__ import annotations

from typing import Annotated

from lmi_server.configuration.options import ModelOptions, Names
from lmi_server.configuration.references import FOR_OPERATOR, NAMES_NOTHING


class MediaOptions(ModelOptions):
    """Keys of serving.properties for images and other media in requests."""

    allowed_media_domains: Annotated[Names, NAMES_NOTHING] = ()
    """Hosts from which URLs in requests may bring images and other media; if not set, any public."""
    allow_private_media: Annotated[bool, FOR_OPERATOR] = False
    """Fetch media from private addresses too, such as those of the server's own network."""
