"""text-generation-inference's own paths: LMI's requests, and answers in the form of that server."""

from __future__ import annotations

from lmi_server.contract.protocol import Input
from lmi_server.dialects import fields, routes
from lmi_server.dialects.base import Exchange, ServedModel
from lmi_server.dialects.lmi import parse_tgi
from lmi_server.dialects.optional import OptionalDialect


def _parse(request: Input, served: ServedModel) -> Exchange:
    return parse_tgi(request, fields.json_object(request), served)


DIALECT = OptionalDialect(
    summaries={
        routes.TGI: "text-generation-inference: generate text, as a stream if the body says so",
        routes.GENERATE: "text-generation-inference: generate text",
        routes.GENERATE_STREAM: "text-generation-inference: generate text as a stream",
    },
    paths={"/": routes.TGI, "/generate": routes.GENERATE, "/generate_stream": routes.GENERATE_STREAM},
    parsers=dict.fromkeys(sorted(routes.TGI_ROUTES), _parse),
    streams={routes.GENERATE_STREAM: True},
)
