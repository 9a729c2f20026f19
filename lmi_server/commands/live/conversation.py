"""A chat with a model of a server over OpenAI's API: what was said, the parameters, and the answers as they come."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Generator, Iterator
from difflib import get_close_matches
from http.client import HTTPException, HTTPResponse
from typing import Any

from lmi_server.client.server_calls import ServerCalls
from lmi_server.contract.errors import ConfigurationError
from lmi_server.contract.texts.quoting import excerpt
from lmi_server.dialects.openai.chat import CHAT_FIELDS

_LIST_S = 30.0
_PATH = "/v1/chat/completions"
_DATA = b"data:"
_END = b"[DONE]"
# What the conversation itself sends is no parameter.
_PARAMETERS = sorted(CHAT_FIELDS.keys() - {"model", "messages", "stream", "stream_options"})


class LiveConversation:
    """The conversation with the model `model`; `parameters` are fields of each request.

    `system` is the text before everything else, "" for none. `usage` has the tokens of the last answer, if known.
    """

    def __init__(self, server: ServerCalls, model: str | None) -> None:
        self.system = ""
        self.parameters: dict[str, Any] = {}
        self.messages: list[dict[str, str]] = []
        self.usage: dict[str, Any] = {}
        self._server = server
        self.model = self.find_model(model)

    def models(self) -> list[str]:
        """Return the names of the models of the server. Raises ConfigurationError if it has none."""
        listed = self._server.json("GET", "/v1/models", _LIST_S)
        found = [str(model["id"]) for model in listed.get("data", ())] if isinstance(listed, dict) else []
        if not found:
            raise ConfigurationError(f"{self._server.url} has no model to chat with")
        return found

    def find_model(self, name: str | None) -> str:
        """Return `name`, or the first model. Raises ConfigurationError if there is no such model."""
        found = self.models()
        if name is not None and name not in found:
            raise ConfigurationError(f"there is no model {name}; there are: {', '.join(found)}")
        return name or found[0]

    def reset(self) -> None:
        """Forget what was said; the system text and the parameters stay."""
        self.messages = []

    def ask(self, text: str) -> Generator[str, None, None]:
        """Say `text`, and yield the answer piece by piece.

        What was answered until the iterator is closed stays in the conversation. Raises ConfigurationError if the
        server refuses or fails; without an answer, the question is not in the conversation either.
        """
        question = {"role": "user", "content": text}
        body = {
            **self.parameters,
            "model": self.model,
            "messages": [*self._first(), *self.messages, question],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        pieces: list[str] = []
        self.usage = {}
        try:
            with self._server.open("POST", _PATH, None, body) as answer:
                for piece in self._pieces(answer):
                    pieces.append(piece)
                    yield piece
        finally:
            if pieces:
                self.messages += [question, {"role": "assistant", "content": "".join(pieces)}]

    def _first(self) -> list[dict[str, str]]:
        return [{"role": "system", "content": self.system}] if self.system else []

    def _pieces(self, answer: HTTPResponse) -> Iterator[str]:
        try:
            for line in answer:
                data = line.removeprefix(_DATA).strip() if line.startswith(_DATA) else b""
                if data and data != _END:
                    yield from self._piece(json.loads(data))
        except (OSError, HTTPException, ValueError) as error:
            raise ConfigurationError(f"the answer of {self._server.url} breaks off: {error}") from error

    def _piece(self, event: dict[str, Any]) -> Iterator[str]:
        if event.get("error"):
            error = event["error"]
            raise ConfigurationError(str(error.get("message", error)) if isinstance(error, dict) else str(error))
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices", ()):
            piece = choice.get("delta", {}).get("content")
            if piece:
                yield piece

    def set(self, name: str, text: str) -> None:
        """Set a parameter to a value in JSON, or to the text itself; without a text, unset it.

        Raises ConfigurationError if a chat has no such parameter.
        """
        if name not in _PARAMETERS:
            near = get_close_matches(name, _PARAMETERS, 1)
            hint = f"; did you mean {near[0]}?" if near else f"; there are: {', '.join(_PARAMETERS)}"
            raise ConfigurationError(f'"{excerpt(name)}" is no parameter of a chat{hint}')
        if not text:
            self.parameters.pop(name, None)
            return
        self.parameters[name] = text
        with contextlib.suppress(ValueError):
            self.parameters[name] = json.loads(text)

    def as_json(self) -> str:
        """Return the whole as the body of a request that has it said again."""
        body = {"model": self.model, **self.parameters, "messages": [*self._first(), *self.messages]}
        return json.dumps(body, indent=2, ensure_ascii=False) + "\n"
