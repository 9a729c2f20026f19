"""Public name of `lmi_server.contract.protocol`: what a RequestHandler gets."""

from lmi_server.contract.protocol import (
    Adapter,
    Input,
)

__all__ = [
    "Adapter",
    "Input",
]
