"""Public name of `lmi_server.contract.generation`: requests and answers of text generation."""

from lmi_server.contract.generation import (
    ChatOptions,
    Delta,
    Feature,
    FinishReason,
    GenerationRequest,
    NamedTool,
    SamplingParameters,
    StructuredOutputs,
    Token,
    ToolCallDelta,
    TopToken,
    Usage,
)

__all__ = [
    "ChatOptions",
    "Delta",
    "Feature",
    "FinishReason",
    "GenerationRequest",
    "NamedTool",
    "SamplingParameters",
    "StructuredOutputs",
    "Token",
    "ToolCallDelta",
    "TopToken",
    "Usage",
]
