"""A handler that answers some requests itself and leaves others to the built-in handler. For tests only."""

from djl_python import Input, Output
from djl_python.async_utils import create_non_stream_output
from djl_python.encode_decode import decode


async def handle(inputs: Input):
    if inputs.is_empty():
        return Output() if inputs.get_property("own_engine") == "true" else None
    prompt = decode(inputs, inputs.get_property("Content-Type")).get("inputs")
    if prompt == "custom":
        return create_non_stream_output({"custom_handler_used": True})
    if prompt == "raise":
        raise RuntimeError("not today")
    return pieces() if prompt == "stream" else None


async def pieces():
    yield Output().add("one ")
    yield Output().add("two")
