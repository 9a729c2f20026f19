"""The vllm pooling handler: embeddings, scores of pairs and classes of texts by vLLM, in dynamic batches."""

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


@dataclass(frozen=True)
class _ParsedRequest:
    """The prompts of one request, and the function that makes its response from their results."""

    prompts: Sequence[Prompt]
    respond: Callable[[Sequence[Pooled]], Response]


class VllmPoolingHandler(RequestHandler):
    """Serves a model directory, or a Hugging Face id, that vLLM can load as a pooling model."""

    def __init__(self) -> None:
        self._model: PoolingModel
        self._served: ServedModel

    def start(self, model_dir: str, options: VllmPoolingOptions) -> ModelInfo:
        self._served = ServedModel(name=self.served_names[0], served_names=tuple(self.served_names))
        self._model = import_engine("engine.pooling_model").PoolingModel(model_dir, options)
        return ModelInfo(max_model_len=self._model.max_length, details=self._model.details)

    def handle(self, requests: Sequence[Input]) -> Sequence[Response | LmiServerError]:
        parsed = [self._parse(request) for request in requests]
        # One run for the prompts of all requests: vLLM batches them by itself.
        prompts = [prompt for one in parsed if isinstance(one, _ParsedRequest) for prompt in one.prompts]
        results = iter(self._model.run(prompts))
        return [
            one if isinstance(one, LmiServerError) else _outcome(one, [next(results) for _ in one.prompts])
            for one in parsed
        ]

    def stop(self) -> None:
        self._model.stop()

    def _parse(self, request: Input) -> _ParsedRequest | LmiServerError:
        try:
            return self._parse_route(request)
        except LmiServerError as error:
            return error

    def _parse_route(self, request: Input) -> _ParsedRequest:
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

    def _invocation(self, request: Input) -> _ParsedRequest:
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

    def _inputs(self, request: Input, body: Mapping[str, Any]) -> _ParsedRequest:
        model, kind = self._model, content.accepted_type(request, content.JSON)
        parameters = read_parameters(body.get("parameters"), _PARAMETERS[model.task])
        texts = openai_embeddings.inputs("inputs", body["inputs"])
        truncate = _TO_MODEL_LENGTH if parameters.get("truncate") else None

        def respond(results: Sequence[Pooled]) -> Response:
            values = [model.label(one) if model.task == "classify" else one.values for one in results]
            return content.encode_response(values, kind)

        if model.task == "classify":
            return _ParsedRequest(model.classifications(texts, truncate), respond)
        embedding_request = EmbeddingRequest(
            inputs=texts, dimensions=parameters.get("dimensions"), truncate_tokens=truncate
        )
        return _ParsedRequest(model.embeddings(embedding_request, parameters.get("normalize")), respond)

    def _embeddings(self, request: Input, body: Mapping[str, Any]) -> _ParsedRequest:
        embedding_request = openai_embeddings.parse(body)
        for warning in embedding_request.warnings:
            logger.warning("%s", warning)
        name = self._shown_model_name(request, embedding_request.model)

        def respond(results: Sequence[Pooled]) -> Response:
            vectors = [result.values.tobytes() for result in results]
            return _json(openai_embeddings.body(name, vectors, embedding_request.encoding_format, _tokens(results)))

        return _ParsedRequest(self._model.embeddings(embedding_request), respond)

    def _score(self, request: Input, body: Mapping[str, Any]) -> _ParsedRequest:
        score_request, comparison = self._model.score(body)
        name = self._shown_model_name(request, score_request.model)

        def respond(results: Sequence[Pooled]) -> Response:
            return _json(scores.score_body(name, comparison.scores(results), _tokens(results)))

        return _ParsedRequest(comparison.prompts, respond)

    def _rerank(self, request: Input, body: Mapping[str, Any]) -> _ParsedRequest:
        rerank_request, comparison = self._model.rerank(body)
        name = self._shown_model_name(request, rerank_request.model)

        def respond(results: Sequence[Pooled]) -> Response:
            relevances = comparison.scores(results)
            return _json(
                scores.rerank_body(name, rerank_request.documents, relevances, rerank_request.top_n, _tokens(results))
            )

        return _ParsedRequest(comparison.prompts, respond)

    def _shown_model_name(self, request: Input, model: str | None) -> str:
        """Return the name of the model for the response. Logs a warning if the client asks for a model not served."""
        name, warnings = openai.name_to_show(request, model, self._served)
        for warning in warnings:
            logger.warning("%s", warning)
        return name


def _outcome(parsed: _ParsedRequest, results: Sequence[Pooled | LmiServerError]) -> Response | LmiServerError:
    for result in results:
        if isinstance(result, LmiServerError):
            return result
    try:
        return parsed.respond([result for result in results if not isinstance(result, LmiServerError)])
    except LmiServerError as error:
        return error


def _tokens(results: Sequence[Pooled]) -> int:
    return sum(result.tokens for result in results)


def _json(data: bytes) -> Response:
    return Response(headers=[("content-type", content.JSON)], data=data)
