"""Public name of `lmi_server.contract.errors`: the errors that a handler of one's own raises, each with a status."""

from lmi_server.contract.errors import (
    BadParameterError,
    ConfigurationError,
    ContextLengthError,
    HandlerError,
    LmiServerError,
    ModelLoadError,
    ModelMemoryError,
    PayloadTooLargeError,
    RequestError,
)

__all__ = [
    "BadParameterError",
    "ConfigurationError",
    "ContextLengthError",
    "HandlerError",
    "LmiServerError",
    "ModelLoadError",
    "ModelMemoryError",
    "PayloadTooLargeError",
    "RequestError",
]
