"""Options of the echo handler."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from lmi_server.configuration.declaration import Allowed
from lmi_server.configuration.options import ModelOptions


class EchoOptions(ModelOptions):
    """Keys of serving.properties for the echo handler."""

    echo_delay_ms: Annotated[float, Field(ge=0, allow_inf_nan=False), Allowed("a number, 0 or more")] = 0.0
    """Milliseconds before each token; 0 is as fast as possible."""
    echo_step: bool = False
    """Emit one token of each request per turn of the event loop, as engines step."""
