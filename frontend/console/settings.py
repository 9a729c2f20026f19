"""The setting that switches the console off."""

from __future__ import annotations

from pydantic import Field

from lmi_server.configuration.declaration import FeatureSettings


class ConsoleSettings(FeatureSettings):
    after = "unix_socket_mode"

    console: bool = Field(
        True, description="The page at /console, on the address of the management API and for the same clients."
    )
