"""`/openapi.json` and `/docs`: what this server answers, made from its routes."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from importlib.metadata import version
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from frontend.http.responses import json_response
from frontend.management.models import MethodRoute
from lmi_server.dialects import routes as names
from lmi_server.dialects.errors import form_of, is_openai
from lmi_server.dialects.optional import Schema, optional_dialects
from lmi_server.dialects.schemas import answer_schema, components, request_schema

# What an inference route does, for readers of the document; the paths themselves come from the router.
_SUMMARIES: Mapping[str, str] = {
    names.INVOCATIONS: "LMI: generate text, or run the task of the model; a body with messages is a chat",
    names.PREDICTIONS: "LMI: as /invocations, with the model in the path",
    names.COMPLETIONS: "OpenAI: complete a prompt",
    names.CHAT_COMPLETIONS: "OpenAI: answer a chat",
    names.RESPONSES: "OpenAI: create a response",
    names.EMBEDDINGS: "OpenAI: embed texts",
    names.IMAGES_GENERATIONS: "OpenAI: draw images from a text",
    names.IMAGES_EDITS: "OpenAI: draw images from an image and a text",
    names.IMAGES_VARIATIONS: "OpenAI: draw variations of an image",
    names.SCORE: "vLLM: score pairs of texts",
    names.RERANK: "vLLM: order documents by a query",
    names.TOKENIZE: "vLLM: return the token ids of a prompt or a chat",
    names.DETOKENIZE: "vLLM: return the text of token ids",
    **optional_dialects().summaries,
}
_ERRORS: Mapping[str, Schema] = {
    "LmiError": {"code": {"type": "integer"}, **{name: {"type": "string"} for name in ("type", "message", "error")}},
    "OpenAIError": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
    **{
        form.name: form.properties
        for forms in (optional_dialects().errors, optional_dialects().errors_below)
        for form in forms.values()
    },
}
_STREAM_TYPES = ("text/event-stream", "application/jsonlines")
# HEAD and OPTIONS are answered wherever HTTP wants them, and TRACE as GET is: they say nothing of their own.
_UNLISTED = frozenset({"HEAD", "OPTIONS", "TRACE"})
_PARAMETER = re.compile(r"{(\w+)(?::\w+)?}")


class Document:
    """The OpenAPI document of one address, which has `routes` and the paths of `inference`, each with its route.

    `answer_types` are the unusual content types of the answers at those paths.
    """

    def __init__(
        self, routes: Sequence[Route], inference: Mapping[str, str], answer_types: Mapping[str, str] = {}
    ) -> None:
        own = [Route("/openapi.json", self.json), Route("/docs", self.page)]
        self.routes = [*routes, *own]
        self._inference = inference
        self._answer_types = answer_types

    async def json(self, request: Request) -> Response:
        """Return this document."""
        return json_response(self.content)

    async def page(self, request: Request) -> Response:
        """Return the document as a page for people."""
        return HTMLResponse(self._html)

    @cached_property
    def _html(self) -> str:
        return _page(self.content)

    @cached_property
    def content(self) -> dict[str, Any]:
        """The document; the routes of an address never change."""
        paths: dict[str, dict[str, Any]] = {}
        for path, route in self._inference.items():
            paths.setdefault(path, {})["post"] = _inference_operation(path, route, self._answer_types.get(path))
        for served in self.routes:
            if served.include_in_schema:
                paths.setdefault(_PARAMETER.sub(r"{\1}", served.path), {}).update(_operations(served))
        errors = {name: {"type": "object", "properties": fields} for name, fields in _ERRORS.items()}
        return {
            "openapi": "3.1.0",
            "info": {"title": "lmi-server", "version": version("lmi-server")},
            "paths": dict(sorted(paths.items())),
            "components": {"schemas": {**components(), **errors}},
        }


def _operations(route: Route) -> Iterator[tuple[str, dict[str, Any]]]:
    handlers = route.handlers if isinstance(route, MethodRoute) else {}
    for method in sorted((route.methods or set()) - _UNLISTED):
        described = handlers.get(method, route.endpoint)
        lines = (described.__doc__ or described.__name__.replace("_", " ")).splitlines()
        yield method.lower(), _operation(method, route.path, lines[0], {"description": "The answer"})


def _inference_operation(path: str, route: str, answer_type: str | None) -> dict[str, Any]:
    content = _contents(route) if answer_type is None else {answer_type: {}}
    answer = {"description": "The answer; a stream if the request asks for one", "content": content}
    body = {"required": True, "content": {kind: {"schema": request_schema(route)} for kind in _body_types(route)}}
    return {**_operation("POST", path, _SUMMARIES[route], answer, route), "requestBody": body}


def _contents(route: str) -> dict[str, Any]:
    streams = {kind: {"schema": {"type": "string"}} for kind in _STREAM_TYPES if "stream" in _fields(route)}
    return {"application/json": {"schema": answer_schema(route)}, **streams}


def _body_types(route: str) -> Sequence[str]:
    if route in optional_dialects().body_types:
        return optional_dialects().body_types[route]
    files = route in (names.IMAGES_EDITS, names.IMAGES_VARIATIONS)
    return ("application/json", "multipart/form-data") if files else ("application/json",)


def _fields(route: str) -> Mapping[str, Any]:
    stream: Mapping[str, Any] = {"stream": {}} if route in optional_dialects().streams else {}
    return {**request_schema(route).get("properties", {}), **stream}


def _operation(
    method: str, path: str, summary: str, answer: dict[str, Any], route: str | None = None
) -> dict[str, Any]:
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in _PARAMETER.findall(path)
    ]
    error = {"schema": {"$ref": f"#/components/schemas/{_error_of(route or path)}"}}
    return {
        "summary": summary.rstrip("."),
        "operationId": re.sub(r"\W+", "_", f"{method.lower()}{path}").rstrip("_"),
        **({"parameters": parameters} if parameters else {}),
        "responses": {"200": answer, "default": {"description": "An error", "content": {"application/json": error}}},
    }


def _error_of(path: str) -> str:
    """Return the schema of the errors of a path, or of a route for inference, which decides there."""
    form = form_of(path)
    if form is not None:
        return form.name
    return "OpenAIError" if is_openai(path) else "LmiError"


# --- the page ---

# Plain HTML without scripts: it works without network, under any content security policy, and behind any prefix.
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "code,pre{font:13px/1.5 ui-monospace,monospace}pre{overflow:auto;background:#8881;padding:.5rem}"
    "summary{cursor:pointer}b{display:inline-block;min-width:4.5rem}"
)


def _page(document: Mapping[str, Any]) -> str:
    rows = "".join(
        _folded_value(
            f"<b>{method.upper()}</b><code>{html.escape(path)}</code> {html.escape(operation['summary'])}", operation
        )
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    )
    schemas = "".join(
        _folded_value(f"<code>{html.escape(name)}</code>", schema)
        for name, schema in document["components"]["schemas"].items()
    )
    title = html.escape(f"{document['info']['title']} {document['info']['version']}")
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
        f'<h1>{title}</h1><p>The same for programs: <a href="openapi.json">openapi.json</a></p>'
        f"{rows}<h2>Schemas</h2>{schemas}</html>"
    )


def _folded_value(title: str, value: Any) -> str:
    return f"<details><summary>{title}</summary><pre>{html.escape(_indent(value))}</pre></details>"


def _indent(value: Any) -> str:
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
