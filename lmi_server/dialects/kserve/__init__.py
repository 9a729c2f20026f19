"""The Open Inference Protocol (KServe v2, Triton): tensors in and out, and texts by its generate extension.

    tensors.py    tensors in JSON and in the binary form -> a request, and back
    texts.py      a request for text, in tensors or by the generate extension -> an Exchange
    values.py     a request to a model that generates no text -> LMI's JSON, and its answer -> tensors

The sources are specification/protocol of kserve/open-inference-protocol, and Triton's extensions for binary tensor data
and for generating text.
"""

from lmi_server.dialects.kserve.texts import parse_generate, parse_infer
from lmi_server.dialects.kserve.values import as_lmi_request, as_tensors

__all__ = ["as_lmi_request", "as_tensors", "parse_generate", "parse_infer"]
