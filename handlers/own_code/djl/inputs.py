"""From the server's requests to djl_python's Input: one request, or a batch of them."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

from djl_python.inputs import Input, make_input, make_input_late
from djl_python.properties import Properties

from lmi_server.contract.errors import BadParameterError, RequestError
from lmi_server.contract.protocol import CUSTOM_ATTRIBUTES
from lmi_server.contract.protocol import Input as Request
from lmi_server.contract.texts.quoting import excerpt
from lmi_server.dialects.forms import form_fields

ADAPTER = "adapter"  # a query parameter, or a field of a form
# Properties that only the server sets, in lower case. User code opens files below model_dir and computes on device_id,
# so a header or custom attribute of that name is not handed to it.
_SERVER_PROPERTIES = frozenset(
    {
        "batch_size",
        "cluster_size",
        "device_id",
        "model_dir",
        "pipeline_parallel_degree",
        "request_tracking_id",
        "requestid",
        "reset_rollingbatch",
        "tensor_parallel_degree",
    }
)


class InputBuilder:
    """Makes Inputs of requests."""

    def __init__(
        self,
        function_name: str,
        common: Mapping[str, Any],
        may_choose_handler: bool,
        adapters: Container[str] | None = None,
        keeps_attributes: bool = False,
    ) -> None:
        """`common` are properties of every Input.

        A client may set the property `handler` only with `may_choose_handler`. `adapters` are the names that a request
        may have as `adapter`; None allows any. With `keeps_attributes` SageMaker's custom attributes are a property,
        too, as they came.
        """
        self._keeps_attributes = keeps_attributes
        self._function_name = function_name
        self._adapters = adapters
        self.common = {**common, "handler": function_name}
        self._may_choose_handler = may_choose_handler

    def one(self, request: Request, **more: str) -> Input:
        """Return the Input of one request; `more` are further properties. Raises RequestError."""
        content = self.content(request)
        name = request.properties.get("handler", self._function_name) if self._may_choose_handler else None
        return make_input_late(lambda: self._properties(request, more), content, name or self._function_name)

    def batch(self, requests: Sequence[Request]) -> Input:
        """Return one Input for several requests, each under the prefix `batch_<index>.`. Raises RequestError."""
        properties = dict(self.common)
        content = []
        for index, request in enumerate(requests):
            prefix = f"batch_{index:03d}."
            properties |= {prefix + name: value for name, value in sent_properties(request).items()}
            content += [(prefix + key, value) for key, value in self.content(request)]
        properties["batch_size"] = str(len(requests))
        return make_input(properties, content, self._function_name)

    def _properties(self, request: Request, more: Mapping[str, str]) -> Properties:
        if self._keeps_attributes and request.custom_attributes:
            more = {CUSTOM_ATTRIBUTES: request.custom_attributes, **more}
        return Properties({**self.common, **sent_properties(request), **more})

    def content(self, request: Request) -> list[tuple[str, bytes]]:
        """Return the content of one request.

        Raises BadParameterError if it sets `handler` without permission or is no valid form, RequestError if it names
        an unknown adapter.
        """
        if not self._may_choose_handler and "handler" in request.properties:
            raise BadParameterError("The handler can't be overridden in a request")
        content = content_of(request)
        if self._adapters is not None:
            self._check_adapter(content, self._adapters)
        return content

    def _check_adapter(self, content: Sequence[tuple[str, bytes]], adapters: Container[str]) -> None:
        for key, value in content:
            name = value.decode(errors="replace") if key == ADAPTER else ""
            if name and name not in adapters:
                raise RequestError(f"The adapter {excerpt(name)} has not been registered")


def sent_properties(request: Request) -> dict[str, str]:
    """Return the headers and custom attributes of a request as the client wrote their names, and its id.

    Those whose names belong to the server are left out.
    """
    written = {name.lower(): name for name in request.names.split("\n")} if request.names else {}
    properties = {
        written.get(name, name): value for name, value in request.properties.items() if name not in _SERVER_PROPERTIES
    }
    properties["requestId"] = request.request_id
    return properties


def content_of(request: Request) -> list[tuple[str, bytes]]:
    """Return the query parameters and the body, or the fields of a form in its place, as (key, bytes).

    A form without any field leaves no content. Raises BadParameterError if the body is no valid form.
    """
    content_type = request.properties.get("content-type")
    if content_type is None:
        return request.content
    fields = form_fields(content_type, request.content[-1][1])
    return request.content if fields is None else [*request.content[:-1], *fields]
