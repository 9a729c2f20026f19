"""The driver in the worker's process tells requests apart by numbers of its own; the engine is a stand-in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lmi_server.contract.errors import HandlerError, LmiServerError
from lmi_server.contract.generation import Delta

pytestmark = pytest.mark.slow  # imports vLLM


class Echo:
    """An engine that gives each request its prompt in each step, one after it was aborted among them."""

    def __init__(self) -> None:
        self.prompts: dict[str, str] = {}
        self.aborted: list[str] = []

    def add_request(self, name: str, prompt: str, parameters: Any, **more: Any) -> None:
        assert name not in self.prompts
        self.prompts[name] = prompt

    def abort_request(self, names: list[str]) -> None:
        self.aborted += names

    def step(self) -> list[Any]:
        return [SimpleNamespace(request_id=name, text=text, finished=False) for name, text in self.prompts.items()]


class Builder:
    """What makes deltas of outputs; it has no text for a prompt that is "broken"."""

    parameters = None

    def build(self, output: Any) -> Delta:
        if output.text == "broken":
            raise LookupError("no such piece")
        return Delta(output.text)


def test_each_request_gets_its_own_outputs_and_one_that_has_no_text_ends_alone() -> None:
    from handlers.vllm.engine.drivers import InProcessEngine

    stand_in: Any = Echo()
    engine = InProcessEngine(stand_in, None)
    received: dict[str, list[Delta | LmiServerError]] = {"a": [], "broken": [], "b": []}
    builder: Any = Builder()
    numbers = [engine.add(prompt, builder, 3, None, outputs.append) for prompt, outputs in received.items()]
    assert len(set(numbers)) == 3
    engine.step()
    engine.abort(numbers[0])
    engine.step()
    assert [output.text for output in received["a"] if isinstance(output, Delta)] == ["a"]
    assert [type(output) for output in received["broken"]] == [HandlerError]
    assert [output.text for output in received["b"] if isinstance(output, Delta)] == ["b", "b"]
    assert stand_in.aborted == [str(numbers[1]), str(numbers[0])]
    assert engine.has_work
