"""Pooling models: a vector or a score for each input, computed by vLLM's engine in this process.

Four parts are vLLM's own: the engine, the renderer, the requests of its score and rerank API, and the processors that
make prompts from pairs of texts and scores from outputs. The engine gets a batch of requests whole and steps until all
of it is done.
"""

from __future__ import annotations

import difflib
import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import TypeAdapter, ValidationError

from handlers.vllm import library
from handlers.vllm.differences import failure_of
from handlers.vllm.engine.configuration import create_engine_config, load_errors
from handlers.vllm.engine.drivers import end_process
from handlers.vllm.engine.loading import CANNOT_LOAD, engine_details, set_threads
from handlers.vllm.options import VllmPoolingOptions
from handlers.vllm.requests.rendering import CLIENT_ERRORS, as_request_error
from lmi_server.contract.errors import HandlerError, LmiServerError, ModelLoadError, RequestError
from lmi_server.dialects.openai.embeddings import EmbeddingRequest

logger = logging.getLogger(__name__)

_EMBED, _CLASSIFY = "embed", "classify"
_SCORERS = ("bi-encoder", "cross-encoder", "late-interaction")


@dataclass(frozen=True)
class Prompt:
    """One input of the engine: its prompt and pooling parameters in vLLM's form."""

    prompt: Any
    parameters: Any


@dataclass(frozen=True)
class Pooled:
    """The result of one prompt: vLLM's output, whose data is a tensor, and the number of tokens of the prompt."""

    output: Any
    tokens: int

    @property
    def values(self) -> Any:
        """The vector, or the score per class: a numpy array (n,) of float32."""
        return self.output.outputs.data.float().flatten().numpy()


@dataclass(frozen=True)
class Comparison:
    """Pairs of texts to be scored; `scores` turns the results of `prompts` into one score per pair."""

    prompts: Sequence[Prompt]
    scores: Callable[[Sequence[Pooled]], Sequence[float]]


class PoolingModel:
    """A loaded pooling model. Not thread-safe."""

    def __init__(self, model_dir: str, options: VllmPoolingOptions) -> None:
        """Load the model. Raises ModelLoadError if vLLM refuses it, or if it makes neither embeddings nor classes."""
        began = time.perf_counter()
        set_threads(options)
        config = create_engine_config(model_dir, options)
        with load_errors(CANNOT_LOAD):
            self._engine = library.in_process_engine(config, [])
        self._config = config.model_config
        supported = self._engine.get_supported_tasks()
        self.task = self._config.get_pooling_task(supported)
        if self.task not in (_EMBED, _CLASSIFY):
            raise ModelLoadError(
                f"vLLM supports {', '.join(supported)} for this model, and neither embed nor classify; serve another"
                " model, or this one with another handler"
            )
        self._normalize = options.normalize
        self._scorer = next(
            (
                processor
                for name, processor in library.pooling_processors(supported, config, self._engine.renderer).items()
                if name in _SCORERS
            ),
            None,
        )
        self._numbers = itertools.count()
        self.max_length: int = self._config.max_model_len
        self.details = {"task": self.task, **engine_details(config, options, began)}

    def embeddings(self, request: EmbeddingRequest, normalize: bool | None = None) -> list[Prompt]:
        """Return the prompts of a request for embeddings; if `normalize` is None, `option.normalize` decides.

        Raises ContextLengthError if an input is too long, RequestError if the model makes no embeddings or vLLM
        refuses the request.
        """
        if self.task != _EMBED:
            raise RequestError("the model classifies and makes no embeddings; send inputs to /invocations")
        parameters = library.PoolingParams(
            task=_EMBED,
            dimensions=request.dimensions,
            use_activation=self._normalize if normalize is None else normalize,
        )
        return self._prompts(request.inputs, parameters, request.truncate_tokens)

    def classifications(self, texts: Sequence[str | tuple[int, ...]], truncate_tokens: int | None) -> list[Prompt]:
        """Return the prompts of texts (strings or token ids) to classify.

        Raises ContextLengthError if a text is too long, RequestError if vLLM refuses it.
        """
        return self._prompts(texts, library.PoolingParams(task=_CLASSIFY), truncate_tokens)

    def label(self, pooled: Pooled) -> dict[str, Any]:
        """Return the most likely label and its score."""
        best = int(pooled.values.argmax())
        return {"label": self._config.hf_config.id2label[best], "score": float(pooled.values[best])}

    def score(self, body: Mapping[str, Any]) -> tuple[Any, Comparison]:
        """Return a parsed request of vLLM's score API, and the pairs that it compares.

        Raises RequestError if the model does not score pairs or vLLM refuses the request.
        """
        return self._comparison(library.ScoreRequest, body)

    def rerank(self, body: Mapping[str, Any]) -> tuple[Any, Comparison]:
        """Return the same as `score`, for a request of vLLM's rerank API."""
        return self._comparison(library.RerankRequest, body)

    def _comparison(self, kind: Any, body: Mapping[str, Any]) -> tuple[Any, Comparison]:
        scorer = self._scorer
        if scorer is None:
            raise RequestError(
                "the model does not score pairs of texts; use an embedding model, or a classifier with one label"
            )
        try:
            request = TypeAdapter(kind).validate_python(body)
            context = library.pooling_context(request, scorer)
            context.pooling_params.verify(self._config)
            context.engine_inputs = [scorer.render(item) for item in scorer.get_request_factory_online(context)]
        except ValidationError as error:
            raise RequestError(_first_problem(error, body)) from error
        except CLIENT_ERRORS as error:
            raise as_request_error(error) from error

        def scores(results: Sequence[Pooled]) -> Sequence[float]:
            context.final_res_batch = [result.output for result in results]
            scorer.post_process_online(context)
            return [library.score_of(output) for output in context.final_res_batch]

        return request, Comparison([Prompt(item["prompts"], item["params"]) for item in context.engine_inputs], scores)

    def run(self, prompts: Sequence[Prompt]) -> list[Pooled | LmiServerError]:
        """Compute all prompts, and return a result for each: its output, or the error of that prompt alone."""
        results: dict[str, Pooled | LmiServerError] = {}
        for prompt in prompts:
            number = str(next(self._numbers))
            results[number] = HandlerError("vLLM gave no output")
            try:
                self._engine.add_request(number, prompt.prompt, prompt.parameters.clone())
            except CLIENT_ERRORS as error:
                results[number] = as_request_error(error)
        try:
            while self._engine.has_unfinished_requests():
                for output in self._engine.step():
                    results[output.request_id] = _result(output)
        # The border to the engine, which guarantees nothing after an exception: another worker takes over.
        except Exception:
            logger.exception("a step failed")
            end_process()
        return list(results.values())

    def stop(self) -> None:
        self._engine.engine_core.shutdown()

    def _prompts(
        self, texts: Sequence[str | tuple[int, ...]], parameters: Any, truncate_tokens: int | None
    ) -> list[Prompt]:
        tokenize_params = replace(
            self._engine.renderer.default_cmpl_tok_params,
            truncate_prompt_tokens=truncate_tokens,
            truncation_side=None if truncate_tokens is None else "right",
            max_total_tokens_param="max_model_len",
        )
        inputs = [{"prompt": text} if isinstance(text, str) else {"prompt_token_ids": list(text)} for text in texts]
        try:
            parameters.verify(self._config)
            rendered = self._engine.renderer.render_cmpl(inputs, tokenize_params)
        except CLIENT_ERRORS as error:
            raise as_request_error(error) from error
        return [Prompt(prompt, parameters) for prompt in rendered]


def _result(output: Any) -> Pooled | LmiServerError:
    failure = failure_of(output)
    if failure is not None:
        return HandlerError(f"vLLM ended the request: {failure}")
    return Pooled(output, len(output.prompt_token_ids))


def _first_problem(error: ValidationError, body: Mapping[str, Any]) -> str:
    """Return the most useful problem of a body that pydantic refuses, with the field's name.

    The body has several forms (text_1 with text_2, queries with documents), and pydantic reports what is missing from
    each of them. The most useful problem is in the field whose name is most like one that the client sent: a client
    that sends text_1 hears of text_2. Otherwise it is the first.
    """
    problems = {_field_name(detail["loc"]): detail for detail in reversed(error.errors())}
    partners = [name for given in body for name in difflib.get_close_matches(given, problems, n=1, cutoff=0.7)]
    name = partners[0] if partners else next(reversed(problems))
    return f"{name}: {problems[name]['msg']}" if name else str(problems[name]["msg"])


def _field_name(location: Sequence[int | str]) -> str:
    """Return the field in pydantic's location of a problem; parts with brackets before it name the form of the body."""
    return next((str(part) for part in location if "[" not in str(part)), "")
