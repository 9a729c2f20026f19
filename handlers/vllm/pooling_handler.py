"""The vllm pooling handler: embeddings, scores of pairs and classes of texts by vLLM, in dynamic batches."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from handlers import content
from handlers.request_groups import GroupHandler, ParsedRequest
from handlers.tasks.task import read_parameters
from handlers.vllm.handler import import_engine
from handlers.vllm.options import VllmPoolingOptions
from lmi_server.contract.errors import LmiServerError, RequestError
from lmi_server.contract.handler import ModelInfo, Response
from lmi_server.contract.protocol import Input
from lmi_server.dialects import fields, openai, routes
from lmi_server.dialects.base import ServedModel
from lmi_server.dialects.openai import embeddings as openai_embeddings
from lmi_server.dialects.openai.embeddings import EmbeddingRequest
from lmi_server.dialects.vllm import scores

if TYPE_CHECKING:
    from handlers.vllm.engine.pooling_model import Pooled, PoolingModel, Prompt

logger = logging.getLogger(__name__)

_PARAMETERS: Mapping[str, Mapping[str, fields.Field]] = {
    "embed": {
        "truncate": fields.Field("truncate", fields.boolean),
        "normalize": fields.Field("normalize", fields.boolean),
        "dimensions": fields.Field("dimensions", fields.integer(1)),
    },
    "classify": {"truncate": fields.Field("truncate", fields.boolean)},
}
_TO_MODEL_LENGTH = -1  # vLLM's value: truncate to the length that the model accepts


class VllmPoolingHandler(GroupHandler[ParsedRequest]):
    """Serves a model directory, or a Hugging Face id, that vLLM can load as a pooling model."""

    def __init__(self) -> None:
        self._model: PoolingModel
        self._served: ServedModel

    def start(self, model_dir: str, options: VllmPoolingOptions) -> ModelInfo:
        self._served = ServedModel(name=self.served_names[0], served_names=tuple(self.served_names))
        self._model = import_engine("engine.pooling_model").PoolingModel(model_dir, options)
        return ModelInfo(max_model_len=self._model.max_length, details=self._model.details)

    def group_of(self, call: ParsedRequest) -> Hashable:
        return ()  # vLLM batches the prompts of all requests by itself

    def run(self, inputs: Sequence[Prompt], calls: Sequence[ParsedRequest]) -> Sequence[Pooled | LmiServerError]:
        return self._model.run(inputs)

    def stop(self) -> None:
        self._model.stop()

    def parse(self, request: Input) -> ParsedRequest:
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
                    f"the model serves {self._model.task} and not /v1/{route}; send inputs to /invocations"
                )

    def _invocation(self, request: Input) -> ParsedRequest:
        """Parse a request to LMI's path: LMI's inputs, or a body that one of the other paths takes."""
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

    def _inputs(self, request: Input, body: Mapping[str, Any]) -> ParsedRequest:
        model, kind = self._model, content.accepted_type(request, content.JSON)
        parameters = read_parameters(body.get("parameters"), _PARAMETERS[model.task])
        texts = openai_embeddings.inputs("inputs", body["inputs"])
        truncate = _TO_MODEL_LENGTH if parameters.get("truncate") else None

        def write(results: Sequence[Pooled]) -> Response:
            values = [model.label(one) if model.task == "classify" else one.values for one in results]
            return content.encode_response(values, kind)

        if model.task == "classify":
            return ParsedRequest(model.classifications(texts, truncate), write)
        embedding_request = EmbeddingRequest(
            inputs=texts, dimensions=parameters.get("dimensions"), truncate_tokens=truncate
        )
        return ParsedRequest(model.embeddings(embedding_request, parameters.get("normalize")), write)

    def _embeddings(self, request: Input, body: Mapping[str, Any]) -> ParsedRequest:
        embedding_request = openai_embeddings.parse(body)
        for warning in embedding_request.warnings:
            logger.warning("%s", warning)
        name = self._shown_model_name(request, embedding_request.model)

        def write(results: Sequence[Pooled]) -> Response:
            vectors = [result.values.tobytes() for result in results]
            return _json(openai_embeddings.body(name, vectors, embedding_request.encoding_format, _tokens(results)))

        return ParsedRequest(self._model.embeddings(embedding_request), write)

    def _score(self, request: Input, body: Mapping[str, Any]) -> ParsedRequest:
        score_request, comparison = self._model.score(body)
        name = self._shown_model_name(request, score_request.model)

        def write(results: Sequence[Pooled]) -> Response:
            return _json(scores.score_body(name, comparison.scores(results), _tokens(results)))

        return ParsedRequest(comparison.prompts, write)

    def _rerank(self, request: Input, body: Mapping[str, Any]) -> ParsedRequest:
        rerank_request, comparison = self._model.rerank(body)
        name = self._shown_model_name(request, rerank_request.model)

        def write(results: Sequence[Pooled]) -> Response:
            relevances = comparison.scores(results)
            return _json(
                scores.rerank_body(name, rerank_request.documents, relevances, rerank_request.top_n, _tokens(results))
            )

        return ParsedRequest(comparison.prompts, write)

    def _shown_model_name(self, request: Input, model: str | None) -> str:
        """Return the name of the model for the response. Logs a warning if the client asks for a model not served."""
        name, warnings = openai.name_to_show(request, model, self._served)
        for warning in warnings:
            logger.warning("%s", warning)
        return name


def _tokens(results: Sequence[Pooled]) -> int:
    return sum(result.tokens for result in results)


def _json(data: bytes) -> Response:
    return Response(headers=[("content-type", content.JSON)], data=data)
