"""Loads models with the vllm handler, each in a fork of one process that has imported vLLM, which takes ten seconds.

A line of standard input is a JSON object: the `options` of a load, or the `directory` of a model with a
serving.properties. The answer is a line of JSON: how many tokens a request of four gets, or why the load failed.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from handlers.vllm.options import VllmOptions
from lmi_server.configuration.handlers import load
from lmi_server.configuration.resolve import resolve_model
from lmi_server.contract.errors import LmiServerError
from lmi_server.contract.generation import GenerationRequest, SamplingParameters
from lmi_server.machine.environment import process_environment
from lmi_server.machine.inventory import this_machine

_RECOMMENDED = {
    key.removeprefix("option."): value
    for key, value in VllmOptions.recommended(this_machine(process_environment())).items()
}


async def outcome(asked: dict[str, Any]) -> int | str:
    """Return the number of tokens of an answer, or the kind and the message of the error."""
    try:
        handler, directory, options = chosen(asked)
        await handler.start(directory, options)
        sampling = SamplingParameters(max_new_tokens=4, ignore_eos=True)
        request = GenerationRequest(request_id="1", prompt="Once", sampling=sampling)
        return sum([len(delta.tokens) async for delta in handler.generate(request)])
    except LmiServerError as error:
        return f"{error.kind}: {error.message}"


def chosen(asked: dict[str, Any]) -> tuple[Any, str, Any]:
    """Return the handler, the directory of the model and the options of a line."""
    if "directory" in asked:
        model = resolve_model(Path(asked["directory"]), process_environment())
        return load(model.handler)(), model.model_dir, model.options
    raw = _RECOMMENDED | asked["options"]
    passed_through = {name: raw.pop(name) for name in raw.keys() - VllmOptions.model_fields.keys()}
    return load("handlers.vllm.handler:VllmHandler")(), raw["model_id"], VllmOptions.restore(raw, passed_through)


if __name__ == "__main__":
    # Libraries read these variables when they are imported, as in a worker.
    os.environ.update(VllmOptions.restore({"model_id": "", **_RECOMMENDED}, {}).worker_environment())
    for name in ("handlers.vllm.engine", "vllm.v1.worker.cpu_model_runner", "vllm.model_executor.models.llama"):
        import_module(name)
    for line in sys.stdin:
        child = os.fork()
        if not child:
            print(json.dumps(asyncio.run(outcome(json.loads(line)))), flush=True)
            os._exit(0)  # an engine that runs would be waited for
        if status := os.waitpid(child, 0)[1]:
            print(json.dumps(f"ended with status {status}"), flush=True)
