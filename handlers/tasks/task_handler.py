"""The base of handlers that run tasks of Hugging Face models on dynamic batches.

Requests of a batch with the same parameters run together. Torch and transformers are imported when the model loads.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from handlers import content
from handlers.request_groups import GroupHandler, ParsedRequest
from handlers.tasks import tgi
from handlers.tasks.options import SPEECH_RECOGNITION, generates
from handlers.tasks.task import Piece, Task, read_parameters
from lmi_server.contract.errors import LmiServerError, ModelLoadError, RequestError, needs_extra
from lmi_server.contract.handler import ModelInfo, Response
from lmi_server.contract.protocol import Input
from lmi_server.contract.texts.quoting import excerpt
from lmi_server.dialects import fields, openai, routes
from lmi_server.dialects.base import ServedModel
from lmi_server.dialects.framing import JSON_LINES, SSE, Framing
from lmi_server.dialects.lmi import wants_tgi
from lmi_server.dialects.openai import embeddings as openai_embeddings

if TYPE_CHECKING:
    from handlers.tasks.encoders.embedding import TextEmbedding

logger = logging.getLogger(__name__)

# Fields that a body may have. Others are ignored with a warning, because clients of the rolling batch send them.
_BODY_FIELDS = frozenset({"inputs", "parameters", "stream"})


@dataclass(frozen=True)
class TaskRequest(ParsedRequest):
    """One parsed request, with its parameters."""

    parameters: Mapping[str, Any]
    framing: Framing | None = None  # of a stream; None for a whole answer
    as_tgi: bool = False  # whether a stream has text-generation-inference's form


class TaskHandler(GroupHandler[TaskRequest]):
    """Serves one task of one model; `load_task` loads it."""

    def __init__(self) -> None:
        self._task: Task
        self._name = ""
        self._served: ServedModel
        self._streams = False
        self._routes = routes.LMI_ROUTES

    @abstractmethod
    def load_task(self, task: str, model_dir: str, options: Any) -> Task:
        """Load the model for `task`. Raises ModelLoadError."""

    def start(self, model_dir: str, options: Any) -> ModelInfo:
        if options.task is None:
            raise ModelLoadError("the model's files imply no task; set option.task")
        self._name = options.task
        self._served = ServedModel(name=self.served_names[0], served_names=tuple(self.served_names))
        self._streams = options.streams and generates(options.task)
        # Hugging Face's clients send `inputs` of any task to the root.
        self._routes = routes.LMI_ROUTES | (routes.TGI_ROUTES if generates(options.task) else {routes.TGI})
        if options.task == SPEECH_RECOGNITION:
            self._routes |= routes.AUDIO_ROUTES
        with needs_extra("tasks of Hugging Face models need", "huggingface"):
            self._task = self.load_task(options.task, model_dir, options)
        details = {"task": options.task, **self._task.details()}
        return ModelInfo(max_model_len=self._task.max_length, details=details)

    @property
    def task(self) -> Task:
        """Return the task, once it is loaded: code of a model.py may use its model and its tokenizer."""
        return self._task

    # --- reading ---

    def parse(self, request: Input) -> TaskRequest:
        if request.route == routes.EMBEDDINGS:
            return self._read_embeddings(request, fields.json_object(request))
        if request.route not in self._routes:
            raise self._not_for(request.route)
        body = content.parse_body(request)
        if request.route in routes.TGI_ROUTES:
            body = self._as_with_tgi(body)
        if "input" in body and "inputs" not in body and self._name == "text-embedding":
            return self._read_embeddings(request, body)
        return self._read_lmi(request, body)

    def _not_for(self, route: str) -> RequestError:
        path = route if route in routes.TGI_ROUTES else f"v1/{route}"
        remedy = "send inputs to /invocations"
        if self._name == SPEECH_RECOGNITION:
            remedy += ", or the file of a sound to /v1/audio/transcriptions"
        if self._name == "text-generation" and route not in routes.POOLING_ROUTES:
            remedy += ", or serve the model with option.rolling_batch=auto instead of static batches"
        return RequestError(f"the model serves {self._name}, which /{path} is not for; {remedy}")

    def _as_with_tgi(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the body of a request to one of text-generation-inference's paths, which leave out the prompt."""
        parameters = body.get("parameters")
        if "return_full_text" not in self._task.parameters or not isinstance(parameters, Mapping | None):
            return body
        return {**body, "parameters": {"return_full_text": False, **(parameters or {})}}

    def _read_embeddings(self, request: Input, body: Mapping[str, Any]) -> TaskRequest:
        if self._name != "text-embedding":
            raise RequestError(f"the model serves {self._name}, not embeddings; set option.task=text-embedding")
        asked = openai_embeddings.parse(body)
        name, warnings = openai.name_to_show(request, asked.model, self._served)
        for warning in (*asked.warnings, *warnings):
            logger.warning("%s", warning)
        embedding: TextEmbedding = self._task  # type: ignore[assignment]

        def write(results: Sequence[Any]) -> Response:
            data = openai_embeddings.body(
                name,
                [result.vector.tobytes() for result in results],
                asked.encoding_format,
                sum(result.tokens for result in results),
            )
            return Response(headers=[("content-type", content.JSON)], data=data)

        return TaskRequest(embedding.read_openai(asked), write, {})

    def _read_lmi(self, request: Input, body: Mapping[str, Any]) -> TaskRequest:
        value, single = self._inputs(body)
        as_tgi = generates(self._name) and wants_tgi(request, self._served)
        single = single or request.route == routes.GENERATE
        task = self._task
        reads_events = self._has_steps and SSE.content_type in request.properties.get("accept", "")
        kind = content.JSON if as_tgi or reads_events else content.accepted_type(request, content.JSON)
        parameters = self._parameters(body)
        task.check(parameters)
        items = value if isinstance(value, list) else [value]
        if not items:
            raise RequestError("inputs: a list of 0 is not allowed; send at least one")
        inputs = [task.read(item, parameters) for item in items]
        parameters = task.fit(inputs, parameters)

        def write(results: Sequence[Any]) -> Response:
            shown = [item for result in results for item in task.items(result)]
            if as_tgi:
                shown = [tgi.with_details(item, parameters) for item in shown]
            return content.encode_response(shown[0] if single else shown, kind)

        if not self._is_streamed(request, body, as_tgi, reads_events):
            return TaskRequest(inputs, write, parameters)
        task.check_stream(parameters)
        if not as_tgi:
            _refuse_details(parameters)
        if (as_tgi or not generates(self._name)) and len(inputs) > 1:
            raise fields.not_allowed("inputs", value, "send one input: a stream is the answer for one")
        return TaskRequest(inputs, write, parameters, SSE if as_tgi or reads_events else JSON_LINES, as_tgi)

    def _is_streamed(self, request: Input, body: Mapping[str, Any], as_tgi: bool, reads_events: bool) -> bool:
        if request.route in (routes.GENERATE, routes.GENERATE_STREAM):
            return request.route == routes.GENERATE_STREAM
        wanted = None if body.get("stream") is None else fields.boolean("stream", body["stream"])
        if as_tgi:
            return bool(wanted)
        # A client that reads events wants a stream, whatever the model's default is.
        return (self._streams or reads_events) and wanted is not False

    def _inputs(self, body: Mapping[str, Any]) -> tuple[Any, bool]:
        """Return `inputs` as sent, and whether it is one object, whose answer is the bare result instead of a list."""
        own = self._task.object_fields
        if "inputs" not in body and own and body.keys() >= set(own):
            return {name: body[name] for name in own}, True
        if body.get("messages") is not None:
            raise RequestError(f"messages: the model serves {self._name}, which has no chat; send inputs")
        value = body.get("inputs")
        if value is None:
            raise RequestError('inputs is missing; send {"inputs": ..., "parameters": {...}}')
        return value, bool(own) and isinstance(value, dict)

    def _parameters(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        own = self._task.object_fields if "inputs" not in body else ()
        for name in body.keys() - _BODY_FIELDS - set(own):
            logger.warning("%s is not known and is ignored", excerpt(name))
        return read_parameters(body.get("parameters"), self._task.parameters)

    @property
    def _has_steps(self) -> bool:
        """Whether an answer grows step by step, so that it can be streamed."""
        return generates(self._name) or self._name == SPEECH_RECOGNITION

    # --- running ---

    def group_of(self, call: TaskRequest) -> Hashable:
        return None if call.framing is not None else self._task.group_of(call.parameters)

    def run(self, inputs: Sequence[Any], calls: Sequence[TaskRequest]) -> Sequence[Any]:
        return self._task.run(inputs, calls[0].parameters)

    def answers(self, calls: Sequence[TaskRequest]) -> Sequence[Response | LmiServerError]:
        framing = calls[0].framing
        return super().answers(calls) if framing is None else [self._stream(calls[0], framing)]

    def failure(self, call: TaskRequest, error: BaseException) -> LmiServerError:
        blamed = None
        if not isinstance(error, LmiServerError):
            blamed = next(filter(None, map(self._task.input_error, call.inputs)), None)
        return blamed or super().failure(call, error)

    def _stream(self, call: TaskRequest, framing: Framing) -> Response:
        """Return a stream of lines or events, one per step, each with what it adds to the text of every input."""
        parameters = {name: value for name, value in call.parameters.items() if name != "details"}
        steps = self._task.stream(call.inputs, parameters)
        details = call.parameters.get("details", False)
        stream = tgi.events(steps, parameters, details) if call.as_tgi else _lines(steps, framing)
        return Response(headers=[("content-type", framing.content_type)], stream=stream)


def _lines(steps: Iterator[Sequence[Piece]], framing: Framing) -> Iterator[bytes]:
    for step in steps:
        texts = [piece.text for piece in step]
        if any(texts):
            yield framing.frame({"outputs": texts})


def _refuse_details(parameters: Mapping[str, Any]) -> None:
    if parameters.get("details"):
        raise RequestError(
            "parameters.details: a stream of a static batch has the texts alone; leave it out, or send stream=false"
        )
