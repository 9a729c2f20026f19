"""The stable_diffusion handler: images by a pipeline of diffusers, in dynamic batches."""

from __future__ import annotations

import base64
import logging
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from handlers import content
from handlers.stable_diffusion.images import encode_image
from handlers.stable_diffusion.options import StableDiffusionOptions
from handlers.stable_diffusion.requests import PARAMETERS, Drawing, DrawingReader, ImageModel
from handlers.tasks.task import pipeline_failure
from lmi_server.contract.errors import EXITS, HandlerError, LmiServerError, ModelLoadError, RequestError
from lmi_server.contract.handler import ModelInfo, RequestHandler, Response
from lmi_server.contract.protocol import Adapter, Input
from lmi_server.contract.texts.quoting import excerpt
from lmi_server.dialects import fields, openai, routes
from lmi_server.dialects.adapters import registered_adapter
from lmi_server.dialects.base import ServedModel
from lmi_server.dialects.forms import form_fields, is_form
from lmi_server.dialects.openai import images as openai_images
from lmi_server.media.budget import media_of_request

logger = logging.getLogger(__name__)

_IMAGE_TYPES = {"image/png": "png", "image/jpeg": "jpeg", "image/webp": "webp"}
_ACCEPTED = (*_IMAGE_TYPES, content.JSON)
_BODY_FIELDS = frozenset({"prompt", "inputs", "parameters", "image", "mask_image", "adapters", "adapter", "model"})
_PROGRESS_S = 5.0


@dataclass(frozen=True)
class _Request:
    """One parsed request, and the function that makes its response from the images."""

    sent: Input
    drawing: Drawing
    respond: Callable[[Sequence[Any]], Response]


class _ClientsGoneError(Exception):
    """Every client that asked for these images has left."""


class StableDiffusionHandler(RequestHandler):
    """Serves a directory with a model_index.json."""

    def __init__(self) -> None:
        self._adapters: dict[str, Adapter] = {}
        self._pipelines: ImageModel
        self._reader: DrawingReader
        self._served: ServedModel

    def start(self, model_dir: str, options: StableDiffusionOptions) -> ModelInfo:
        self._pipelines = self.load(options.model_id or model_dir, options)
        self._reader = DrawingReader(options, self._pipelines)
        self._served = ServedModel(
            name=self.served_names[0], served_names=tuple(self.served_names), adapters=self._adapters.keys()
        )
        return ModelInfo(max_model_len=0, details=self._pipelines.details)

    def load(self, directory: str, options: Any) -> ImageModel:
        """Load the pipeline in `directory`. Raises ModelLoadError."""
        try:
            from handlers.stable_diffusion.pipelines import Pipelines
        except ImportError as error:
            raise ModelLoadError(
                f"images need the extra 'stable-diffusion' ({error}); install lmi-server[stable-diffusion]"
            ) from error
        return Pipelines(directory, options)

    def handle(self, requests: Sequence[Input]) -> Sequence[Response | LmiServerError]:
        outcomes: dict[int, Response | LmiServerError] = {}
        groups: dict[Hashable, dict[int, _Request]] = {}
        for index, sent in enumerate(requests):
            try:
                with media_of_request():
                    request = self._read(sent)
            except LmiServerError as error:
                outcomes[index] = error
            else:
                groups.setdefault(request.drawing.group(), {})[index] = request
        for group in groups.values():
            outcomes |= dict(zip(group, self._answers(list(group.values())), strict=True))
        return [outcomes[index] for index in range(len(requests))]

    def add_adapter(self, adapter: Adapter) -> str:
        self._pipelines.add_adapter(adapter.name, adapter.directory)
        self._adapters[adapter.name] = adapter
        return ""

    def remove_adapter(self, name: str) -> str:
        self._pipelines.remove_adapter(name)
        self._adapters.pop(name, None)
        return ""

    # --- reading ---

    def _read(self, sent: Input) -> _Request:
        if sent.route in routes.IMAGE_ROUTES:
            return self._read_openai(sent)
        if sent.route in routes.LMI_ROUTES or sent.route == routes.TGI:
            return self._read_lmi(sent)
        raise RequestError(
            f"the model makes images, which /{sent.route} is not for; send a prompt to /invocations or to"
            " /v1/images/generations"
        )

    def _read_openai(self, sent: Input) -> _Request:
        body = openai_images.read_body(sent)
        asked = openai_images.parse(sent, body, _PARAMETERS_OF_OPENAI)
        _, warnings = openai.name_to_show(sent, asked.model, self._served)
        for warning in (*asked.warnings, *warnings):
            logger.warning("%s", warning)
        drawing = self._reader.openai(asked, registered_adapter(sent, body, self._served))

        def respond(images: Sequence[Any]) -> Response:
            drawn = [
                openai_images.ImageFile(encode_image(image, asked.output_format, asked.quality), seed)
                for image, seed in zip(images, drawing.seeds, strict=True)
            ]
            data = openai_images.body(int(time.time()), drawn, asked.output_format, images[0].size)
            return Response(headers=[("content-type", content.JSON)], data=data)

        return _Request(sent, drawing, respond)

    def _read_lmi(self, sent: Input) -> _Request:
        body = _lmi_body(sent)
        for name in sorted(body.keys() - _BODY_FIELDS):
            logger.warning("%s is not known and is ignored", excerpt(name))
        drawing = self._reader.lmi(body, registered_adapter(sent, body, self._served))
        several = len(drawing.seeds) > 1
        kind = content.accepted_type(sent, content.JSON if several else "image/png", _ACCEPTED)
        if several and kind != content.JSON:
            raise RequestError(
                f"Accept: {kind} holds one image, and the request asks for {len(drawing.seeds)}; accept {content.JSON}"
            )

        def respond(images: Sequence[Any]) -> Response:
            data = _as_json(images, drawing) if kind == content.JSON else encode_image(images[0], _IMAGE_TYPES[kind])
            return Response(headers=[("content-type", kind)], data=data)

        return _Request(sent, drawing, respond)

    # --- running ---

    def _answers(self, group: Sequence[_Request]) -> Sequence[Response | LmiServerError]:
        try:
            drawn = self._draw(group)
        except EXITS:
            raise
        except _ClientsGoneError:
            return [HandlerError("the client is gone")] * len(group)
        except BaseException as error:  # noqa: BLE001 - the border to engines
            if len(group) > 1:
                return [answer for request in group for answer in self._answers([request])]
            return [pipeline_failure(error)]
        return [_response(request, images) for request, images in zip(group, drawn, strict=True)]

    def _draw(self, group: Sequence[_Request]) -> Sequence[Sequence[Any]]:
        """Return the images of each request. Raises _ClientsGoneError if the clients of all of them have left."""
        began = logged = time.monotonic()
        count = sum(len(request.drawing.seeds) for request in group)
        names = ", ".join(request.sent.request_id for request in group)

        def on_step(done: int, steps: int) -> None:
            nonlocal logged
            self._stop_if_gone(group, f"step {done} of {steps}")
            now = time.monotonic()
            if now - logged >= _PROGRESS_S:
                logged = now
                logger.info("request %s: step %d of %d, %.1f s", names, done, steps, now - began)

        self._stop_if_gone(group, "the first step")
        logger.info("request %s: drawing %d images (%s)", names, count, group[0].drawing.task)
        drawn = self._pipelines.draw([request.drawing for request in group], on_step)
        logger.info("request %s: drew %d images in %.2f s", names, count, time.monotonic() - began)
        return drawn

    def _stop_if_gone(self, group: Sequence[_Request], place: str) -> None:
        if all(self.is_cancelled(request.sent) for request in group):
            logger.info("request %s: the client is gone at %s", group[0].sent.request_id, place)
            raise _ClientsGoneError


def _response(request: _Request, images: Sequence[Any]) -> Response | LmiServerError:
    try:
        return request.respond(images)
    except Exception as error:  # noqa: BLE001 - the border to Pillow: a format may not hold images of that size
        return pipeline_failure(error)


# OpenAI's fields say the number of images and their size.
_PARAMETERS_OF_OPENAI = {
    name: field
    for name, field in PARAMETERS.items()
    if name not in ("prompt", "width", "height", "num_images_per_prompt")
}
_JSON_PART = "json"  # of LMI's form, whose part `data` is an image
_FORM_NAMES = {"data": "image", "mask": "mask_image"}


def _lmi_body(sent: Input) -> Mapping[str, Any]:
    """Return LMI's body as an object: JSON, a text that is the prompt, or a form with the file of an image."""
    kind = sent.properties.get("content-type", "")
    parts = form_fields(kind, sent.body()) if is_form(kind) else None
    if parts is not None:
        return _form_body(parts)
    if fields.media_type(sent).startswith("text/"):
        return {"prompt": fields.plain_text(sent).removeprefix("\ufeff")}
    return fields.json_object(sent)


def _form_body(parts: Sequence[tuple[str, bytes]]) -> Mapping[str, Any]:
    body: dict[str, Any] = {}
    parameters: dict[str, Any] = {}
    for name, value in parts:
        field = _FORM_NAMES.get(name, name)
        if name == _JSON_PART:
            body |= fields.json_object(Input(routes.INVOCATIONS, {}, [("data", value)]))
        elif field in ("image", "mask_image"):
            body[field] = value
        else:
            (body if field in _BODY_FIELDS else parameters)[field] = value.decode(errors="replace")
    given = body.get("parameters") or {}
    return {**body, "parameters": {**given, **parameters} if isinstance(given, dict) else given}


def _as_json(images: Sequence[Any], drawing: Drawing) -> bytes:
    files = [base64.b64encode(encode_image(image, "png")).decode() for image in images]
    return content.encode_json({"images": files, "seeds": list(drawing.seeds)})
