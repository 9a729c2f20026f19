"""Public name of `lmi_server.contract.handler`: the interfaces that a handler of one's own implements."""

from lmi_server.contract.handler import (
    AsyncRequestHandler,
    LLMHandler,
    ModelInfo,
    RequestHandler,
    Response,
)

__all__ = [
    "AsyncRequestHandler",
    "LLMHandler",
    "ModelInfo",
    "RequestHandler",
    "Response",
]
