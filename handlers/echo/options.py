"""Options of the echo handler."""

from __future__ import annotations

from lmi_server.configuration.options import ModelOptions, NonNegativeFloat


class EchoOptions(ModelOptions):
    """Keys of serving.properties for the echo handler."""

    echo_delay_ms: NonNegativeFloat = 0.0
    """Milliseconds before each token; 0 is as fast as possible."""
    echo_step: bool = False
    """Emit one token of each request per turn of the event loop, as engines step."""
