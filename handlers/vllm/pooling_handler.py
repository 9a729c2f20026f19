"""The vllm pooling handler: embeddings, scores of pairs and classes of texts by vLLM, a batch of requests at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from handlers import content
from handlers.tasks.task import read_parameters
from handlers.vllm.handler import import_engine
from handlers.vllm.options import VllmPoolingOptions
from lmi_server.contract.errors import LmiServerError, RequestError
from lmi_server.contract.handler import ModelInfo, RequestHandler, Response
from lmi_server.contract.protocol import Input
from lmi_server.dialects import fields, openai, routes, scores
from lmi_server.dialects.base import ServedModel
from lmi_server.dialects.openai import embeddings as openai_embeddings
from lmi_server.dialects.openai.embeddings import EmbeddingRequest

if TYPE_CHECKING:
    from handlers.vllm.pooling_model import Pooled, PoolingModel, Prompt

logger = logging.getLogger(__name__)

_PARAMETERS: Mapping[str, Mapping[str, fields.Field]] = {
    "embed": {
        "truncate": fields.Field("truncate", fields.boolean),
        "normalize": fields.Field("normalize", fields.boolean),
        "dimensions": fields.Field("dimensions", fields.integer(1)),
    },
    "classify": {"truncate": fields.Field("truncate", fields.boolean)},
}
_WHOLE = -1  # cut to what the model takes


@dataclass(frozen=True)
class _Call:
    """One request: its prompts, and what writes its answer from what became of them."""

    prompts: Sequence[Prompt]
    write: Callable[[Sequence[Pooled]], Response]


class VllmPoolingHandler(RequestHandler):
    """Serves a model directory or name that vLLM can load as a model that pools."""

    def __init__(self) -> None:
        self._model: PoolingModel
        self._served: ServedModel

    def start(self, model_dir: str, options: VllmPoolingOptions) -> ModelInfo:
        self._served = ServedModel(name=self.served_names[0], served_names=tuple(self.served_names))
        self._model = import_engine("pooling_model").PoolingModel(model_dir, options)
        return ModelInfo(max_model_len=self._model.max_length, details=self._model.details)

    def handle(self, requests: Sequence[Input]) -> Sequence[Response | LmiServerError]:
        calls = [self._read(request) for request in requests]
        prompts = [prompt for call in calls if isinstance(call, _Call) for prompt in call.prompts]
        results = iter(self._model.run(prompts))
        return [
            call if isinstance(call, LmiServerError) else _answer(call, [next(results) for _ in call.prompts])
            for call in calls
        ]

    def stop(self) -> None:
        self._model.stop()

    def _read(self, request: Input) -> _Call | LmiServerError:
        try:
            return self._call(request)
        except LmiServerError as error:
            return error

    def _call(self, request: Input) -> _Call:
        match request.route:
            case routes.EMBEDDINGS:
                return self._embeddings(request, fields.json_object(request))
            case routes.SCORE:
                return self._score(request, fields.json_object(request))
            case routes.RERANK:
                return self._rerank(request, fields.json_object(request))
            case routes.INVOCATIONS | routes.PREDICTIONS:
                return self._invocation(request)
            case route:
                raise RequestError(
                    f"the model serves {self._model.task}, which /v1/{route} is not for; send inputs to /invocations"
                )

    def _invocation(self, request: Input) -> _Call:
        """Read what LMI's path takes: LMI's inputs, or a body of one of the other paths."""
        body = content.parse_body(request)
        if "inputs" in body:
            return self._inputs(request, body)
        if "input" in body:
            return self._embeddings(request, body)
        if "query" in body:
            return self._rerank(request, body)
        if not scores.PAIRED.isdisjoint(body):
            return self._score(request, body)
        raise RequestError('inputs is missing; send {"inputs": ["a text"], "parameters": {...}}')

    def _inputs(self, request: Input, body: Mapping[str, Any]) -> _Call:
        model, kind = self._model, content.accepted_type(request, content.JSON)
        given = read_parameters(body.get("parameters"), _PARAMETERS[model.task])
        texts = openai_embeddings.inputs("inputs", body["inputs"])
        cut = _WHOLE if given.get("truncate") else None

        def write(results: Sequence[Pooled]) -> Response:
            shown = [model.label(one) if model.task == "classify" else one.values for one in results]
            return content.encode_response(shown, kind)

        if model.task == "classify":
            return _Call(model.classifications(texts, cut), write)
        asked = EmbeddingRequest(inputs=texts, dimensions=given.get("dimensions"), truncate_tokens=cut)
        return _Call(model.embeddings(asked, given.get("normalize")), write)

    def _embeddings(self, request: Input, body: Mapping[str, Any]) -> _Call:
        asked = openai_embeddings.parse(body)
        for warning in asked.warnings:
            logger.warning("%s", warning)
        name = self._shown_model_name(request, asked.model)

        def write(results: Sequence[Pooled]) -> Response:
            vectors = [result.values.tobytes() for result in results]
            return _json(openai_embeddings.body(name, vectors, asked.encoding_format, _tokens(results)))

        return _Call(self._model.embeddings(asked), write)

    def _score(self, request: Input, body: Mapping[str, Any]) -> _Call:
        asked, comparison = self._model.score(body)
        name = self._shown_model_name(request, asked.model)

        def write(results: Sequence[Pooled]) -> Response:
            return _json(scores.score_body(name, comparison.scores(results), _tokens(results)))

        return _Call(comparison.prompts, write)

    def _rerank(self, request: Input, body: Mapping[str, Any]) -> _Call:
        asked, comparison = self._model.rerank(body)
        name = self._shown_model_name(request, asked.model)

        def write(results: Sequence[Pooled]) -> Response:
            told = comparison.scores(results)
            return _json(scores.rerank_body(name, asked.documents, told, asked.top_n, _tokens(results)))

        return _Call(comparison.prompts, write)

    def _shown_model_name(self, request: Input, model: str | None) -> str:
        name, warnings = openai.shown_model_name(request, model, self._served)
        for warning in warnings:
            logger.warning("%s", warning)
        return name


def _answer(call: _Call, results: Sequence[Pooled | LmiServerError]) -> Response | LmiServerError:
    for result in results:
        if isinstance(result, LmiServerError):
            return result
    try:
        return call.write([result for result in results if not isinstance(result, LmiServerError)])
    except LmiServerError as error:
        return error


def _tokens(results: Sequence[Pooled]) -> int:
    return sum(result.tokens for result in results)


def _json(data: bytes) -> Response:
    return Response(headers=[("content-type", content.JSON)], data=data)
