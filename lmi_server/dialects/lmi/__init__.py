"""LMI's dialect: `inputs`, `parameters` and `stream` in; JSON, JSON lines or server-sent events out.

Shapes and semantics follow LMI's rolling batch. With `option.tgi_compat` the answers have the shapes of
text-generation-inference, which `huggingface_hub.InferenceClient.text_generation` reads; on that server's paths
(`routes.TGI_ROUTES`), and for its client, they always have.

    request.py      the fields of a request -> a GenerationRequest
    formatters.py   option.output_formatter -> the form of the answer
    answer.py       deltas -> bytes, one Exchange per form
    async_answer.py the same in the shape of the asynchronous service
    objects.py      the JSON objects in answers
"""

from lmi_server.dialects.lmi.answer import token_texts
from lmi_server.dialects.lmi.async_answer import AsyncLinesExchange
from lmi_server.dialects.lmi.formatters import FORMATTER_NAMES
from lmi_server.dialects.lmi.request import NO_EFFECT, PARAMETERS, parse, parse_csv, parse_text, parse_tgi, wants_tgi

__all__ = [
    "FORMATTER_NAMES",
    "NO_EFFECT",
    "PARAMETERS",
    "AsyncLinesExchange",
    "parse",
    "parse_csv",
    "parse_text",
    "parse_tgi",
    "token_texts",
    "wants_tgi",
]
