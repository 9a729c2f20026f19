"""Loads models with the vllm handlers, each in a fork of one process that has imported vLLM, which takes ten seconds.

A line of standard input is a JSON object: the `options` of a load, or the `directory` of a model with a
serving.properties. It may also have:

- `variables`: variables of the environment,
- `start`: "fork" if the processes of the engine are to be forks; without it each of them imports vLLM again,
- `until`: a pattern; the requests wait for a log line that has it, and what compiles meanwhile is a fork,
- `prompts`, and how many `tokens` each of them gets (4), or `requests`, pairs of a route and a body,
- `kill`: after the answers, a process of the engine with this in its name is killed.

The answer is a line of JSON: an object with the `answers` and the `log`, or a text that says why there are none. If the
load ends by something else than its own will, a line that says so follows.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import forked_engines
import psutil

from handlers.vllm.description import VllmEngine
from handlers.vllm.options import VllmOptions
from lmi_server.configuration.engine import EngineDescription
from lmi_server.configuration.handlers import HANDLERS, load
from lmi_server.configuration.resolve import resolve_model
from lmi_server.contract.errors import LmiServerError
from lmi_server.contract.generation import GenerationRequest, SamplingParameters
from lmi_server.contract.handler import LLMHandler, RequestHandler, Response
from lmi_server.contract.protocol import Input
from lmi_server.machine.environment import process_environment
from lmi_server.machine.inventory import this_machine
from lmi_server.processes import model_imports

_LIMIT_S = 240.0  # below that of vllm_helpers.Loader: a line then gets its own answer, also when it waits too long
_PAUSE_S = 0.2
_VLLM = HANDLERS.by_title("vllm")
_RECOMMENDED = {
    key.removeprefix("option."): value
    for key, value in VllmEngine.recommend(this_machine(process_environment())).items()
}


class Log(logging.Handler):
    """Keeps the messages of the handler."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())

    async def wait_for(self, pattern: str) -> None:
        deadline = time.monotonic() + _LIMIT_S
        while not any(re.search(pattern, message) for message in self.messages):
            assert time.monotonic() < deadline, (pattern, self.messages)
            # One that compiles in the background would wait for other tests.
            for child in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    child.nice(0)
            await asyncio.sleep(_PAUSE_S)


async def outcome(asked: dict[str, Any]) -> dict[str, Any] | str:
    """Return the answers and the log, or the kind and the message of the error."""
    os.environ.update(asked.get("variables", {}))
    log = Log()
    logging.getLogger("handlers").addHandler(log)
    logging.getLogger("handlers").setLevel(logging.INFO)
    try:
        handler, directory, engine = chosen(asked)
        options: Any = engine.options
        os.environ.update(engine.worker_environment())
        if isinstance(handler, RequestHandler):
            return {"answers": handled(handler, directory, options, asked["requests"])}
        await handler.start(directory, options)
        if "until" in asked:
            await log.wait_for(asked["until"])
        prompts, tokens = asked.get("prompts", ["Once"]), asked.get("tokens", 4)
        answers = await asyncio.gather(*(generated(handler, prompt, tokens) for prompt in prompts))
        return {"answers": answers, "log": log.messages}
    except LmiServerError as error:
        return f"{error.kind}: {error.message}"


def chosen(asked: dict[str, Any]) -> tuple[Any, str, EngineDescription[Any]]:
    """Return the handler, the directory of the model and the engine with the options of a line."""
    if "directory" in asked:
        model = resolve_model(Path(asked["directory"]), process_environment())
        return load(model.handler)(), model.model_dir, model.engine
    raw = _RECOMMENDED | asked["options"]
    passed_through = {name: raw.pop(name) for name in raw.keys() - VllmOptions.model_fields.keys()}
    engine = VllmEngine(_VLLM, VllmOptions.restore(raw, passed_through))
    return load("handlers.vllm.handler:VllmHandler")(), raw["model_id"], engine


async def generated(handler: LLMHandler, prompt: str, tokens: int) -> list[int]:
    sampling = SamplingParameters(max_new_tokens=tokens, ignore_eos=True)
    request = GenerationRequest(request_id="1", prompt=prompt, sampling=sampling)
    return [token.id async for delta in handler.generate(request) for token in delta.tokens]


def handled(handler: RequestHandler, directory: str, options: Any, requests: list[tuple[str, Any]]) -> list[Any]:
    """Return the answers of all requests, which the handler gets as one batch; the message of one that fails."""
    handler.served_names = ("model",)
    handler.start(directory, options)
    headers = {"content-type": "application/json"}
    batch = [Input(route, headers, [("data", json.dumps(body).encode())]) for route, body in requests]
    return [json.loads(one.data) if isinstance(one, Response) else one.message for one in handler.handle(batch)]


async def run(asked: dict[str, Any]) -> None:
    """Do what a line asks for, in a process of its own that ends then."""
    print(json.dumps(await outcome(asked)), flush=True)
    if "kill" in asked:
        children = psutil.Process().children(recursive=True)
        next(child for child in children if asked["kill"] in child.name()).kill()
        await asyncio.sleep(_LIMIT_S)  # this process does not outlive a part of its engine
    os._exit(0)  # an engine that runs would be waited for


if __name__ == "__main__":
    # Libraries read these variables when they are imported, as in a worker.
    os.environ.update(VllmEngine(_VLLM, VllmOptions.model_validate(_RECOMMENDED)).worker_environment())
    model_imports.prepare()
    for name in ("handlers.vllm.engine.loading", "vllm.v1.worker.cpu_worker", "vllm.model_executor.models.llama"):
        import_module(name)
    model_imports.freeze_libraries()
    sys.modules["__main__"] = import_module("lmi_server.worker.__main__")  # as in a worker: what it spawns imports it
    for line in sys.stdin:
        child = os.fork()
        if not child:
            asked = json.loads(line)
            if asked.get("start") == "fork":
                forked_engines.install()
            if "until" in asked:
                forked_engines.install_compiler()
            asyncio.run(run(asked))
        if status := os.waitpid(child, 0)[1]:
            print(json.dumps(f"ended with status {status}"), flush=True)
