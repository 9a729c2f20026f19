"""The Open Inference Protocol (KServe v2, Triton): tensors in and out, and texts by its generate extension.

    tensors.py    tensors in JSON and in the binary form -> a request, and back
    texts.py      a request for text, in tensors or by the generate extension -> an Exchange
    values.py     a request to a model that generates no text -> LMI's JSON, and its answer -> tensors

The sources are specification/protocol of kserve/open-inference-protocol, and Triton's extensions for binary tensor data
and for generating text.
"""

from lmi_server.dialects.kserve import route_names as routes
from lmi_server.dialects.kserve.tensors import InferBody
from lmi_server.dialects.kserve.texts import parse_generate, parse_infer
from lmi_server.dialects.kserve.values import as_lmi_request, as_tensors
from lmi_server.dialects.optional import ErrorForm, OptionalDialect, Translation

__all__ = ["DIALECT", "as_lmi_request", "as_tensors", "parse_generate", "parse_infer"]

_GENERATE = (routes.V2_GENERATE, routes.V2_GENERATE_STREAM)
_GENERATE_BODY = {
    "type": "object",
    "properties": {
        "text_input": {"type": "string"},
        "id": {"type": "string"},
        "parameters": {"$ref": "#/components/schemas/Parameters"},
    },
    "required": ["text_input"],
}
_ERROR = ErrorForm(
    write=lambda error, status, _: (status, {"error": error.message}),
    event="",
    name="KServeError",
    properties={"error": {"type": "string"}},
)
# The paths name the model, so that the front end reads them (frontend/kserve/predictions.py).
DIALECT = OptionalDialect(
    summaries={
        routes.INFER: "Open Inference Protocol: tensors in, tensors out",
        routes.V2_GENERATE: "Open Inference Protocol: generate text",
        routes.V2_GENERATE_STREAM: "Open Inference Protocol: generate text as a stream",
    },
    parsers={routes.INFER: parse_infer, **dict.fromkeys(_GENERATE, parse_generate)},
    translations={routes.INFER: Translation(as_lmi_request, as_tensors)},
    bodies={routes.INFER: InferBody, **dict.fromkeys(_GENERATE, _GENERATE_BODY)},
    streams={routes.V2_GENERATE_STREAM: True},
    errors_below={"v2": _ERROR},
)
