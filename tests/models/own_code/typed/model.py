"""A handler in lmi_server's own contract: answers with the size of the batch and the body. For tests only."""

from __future__ import annotations

from collections.abc import Sequence

from handlers.own_code.options import OwnCodeOptions
from lmi_server.errors import LmiServerError, RequestError
from lmi_server.handler import ModelInfo, RequestHandler, Response
from lmi_server.protocol import Input


class Model(RequestHandler):
    def start(self, model_dir: str, options: OwnCodeOptions) -> ModelInfo:
        self._greeting = options.given["greeting"]
        return ModelInfo(max_model_len=0)

    def handle(self, requests: Sequence[Input]) -> Sequence[Response | LmiServerError]:
        return [self._answer(request, len(requests)) for request in requests]

    def _answer(self, request: Input, size: int) -> Response | LmiServerError:
        if request.body() == b"refuse":
            return RequestError("refused")
        return Response(data=b"%b %d %b" % (self._greeting.encode(), size, request.body()))
