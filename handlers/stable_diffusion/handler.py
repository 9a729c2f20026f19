"""The stable_diffusion handler: images by a pipeline of diffusers, in dynamic batches."""

from __future__ import annotations

import base64
import logging
import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from handlers import content
from handlers.request_groups import GroupHandler, ParsedRequest
from handlers.stable_diffusion.images import encode_image
from handlers.stable_diffusion.options import StableDiffusionOptions
from handlers.stable_diffusion.requests import PARAMETERS, Drawing, DrawingReader, ImageModel
from lmi_server.contract.errors import HandlerError, RequestError, needs_extra
from lmi_server.contract.handler import ModelInfo, Response
from lmi_server.contract.protocol import Adapter, Input
from lmi_server.contract.texts.quoting import excerpt
from lmi_server.dialects import fields, openai, routes
from lmi_server.dialects.adapters import registered_adapter
from lmi_server.dialects.base import ServedModel
from lmi_server.dialects.forms import form_fields, is_form
from lmi_server.dialects.openai import images as openai_images

logger = logging.getLogger(__name__)

_IMAGE_TYPES = {"image/png": "png", "image/jpeg": "jpeg", "image/webp": "webp"}
_ACCEPTED = (*_IMAGE_TYPES, content.JSON)
_BODY_FIELDS = frozenset({"prompt", "inputs", "parameters", "image", "mask_image", "adapters", "adapter", "model"})
_PROGRESS_S = 5.0


@dataclass(frozen=True)
class _Request(ParsedRequest):
    """One parsed request. Its input is one drawing, whose result are its images."""

    sent: Input

    @property
    def drawing(self) -> Drawing:
        drawing: Drawing = self.inputs[0]
        return drawing


class StableDiffusionHandler(GroupHandler[_Request]):
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
        with needs_extra("images need", "stable-diffusion"):
            from handlers.stable_diffusion.pipelines import Pipelines
        return Pipelines(directory, options)

    def add_adapter(self, adapter: Adapter) -> str:
        self._pipelines.add_adapter(adapter.name, adapter.directory)
        self._adapters[adapter.name] = adapter
        return ""

    def remove_adapter(self, name: str) -> str:
        self._pipelines.remove_adapter(name)
        self._adapters.pop(name, None)
        return ""

    # --- reading ---

    def parse(self, request: Input) -> _Request:
        if request.route in routes.IMAGE_ROUTES:
            return self._read_openai(request)
        if request.route in routes.LMI_ROUTES or request.route == routes.TGI:
            return self._read_lmi(request)
        raise RequestError(
            f"the model makes images, which /{request.route} is not for; send a prompt to /invocations or to"
            " /v1/images/generations"
        )

    def _read_openai(self, sent: Input) -> _Request:
        body = openai_images.read_body(sent)
        asked = openai_images.parse(sent, body, _PARAMETERS_OF_OPENAI)
        _, warnings = openai.name_to_show(sent, asked.model, self._served)
        for warning in (*asked.warnings, *warnings):
            logger.warning("%s", warning)
        drawing = self._reader.openai(asked, registered_adapter(sent, body, self._served))

        def write(results: Sequence[Any]) -> Response:
            (images,) = results
            drawn = [
                openai_images.ImageFile(encode_image(image, asked.output_format, asked.quality), seed)
                for image, seed in zip(images, drawing.seeds, strict=True)
            ]
            data = openai_images.body(int(time.time()), drawn, asked.output_format, images[0].size)
            return Response(headers=[("content-type", content.JSON)], data=data)

        return _Request([drawing], write, sent)

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

        def write(results: Sequence[Any]) -> Response:
            (images,) = results
            data = _as_json(images, drawing) if kind == content.JSON else encode_image(images[0], _IMAGE_TYPES[kind])
            return Response(headers=[("content-type", kind)], data=data)

        return _Request([drawing], write, sent)

    # --- running ---

    def group_of(self, call: _Request) -> Hashable:
        return call.drawing.group()

    def run(self, inputs: Sequence[Drawing], calls: Sequence[_Request]) -> Sequence[Sequence[Any]]:
        """Return the images of each request. Raises HandlerError if the clients of all of them have left."""
        began = logged = time.monotonic()
        count = sum(len(call.drawing.seeds) for call in calls)
        names = ", ".join(call.sent.request_id for call in calls)

        def on_step(done: int, steps: int) -> None:
            nonlocal logged
            self._stop_if_gone(calls, f"step {done} of {steps}")
            now = time.monotonic()
            if now - logged >= _PROGRESS_S:
                logged = now
                logger.info("request %s: step %d of %d, %.1f s", names, done, steps, now - began)

        self._stop_if_gone(calls, "the first step")
        logger.info("request %s: drawing %d images (%s)", names, count, calls[0].drawing.task)
        drawn = self._pipelines.draw(inputs, on_step)
        logger.info("request %s: drew %d images in %.2f s", names, count, time.monotonic() - began)
        return drawn

    def _stop_if_gone(self, calls: Sequence[_Request], place: str) -> None:
        if all(self.is_cancelled(call.sent) for call in calls):
            logger.info("request %s: the client is gone at %s", calls[0].sent.request_id, place)
            raise HandlerError("the client is gone")


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
