"""Loads a model with the vllm handler and prints why that failed: `vllm_loader.py MODEL NAME=VALUE...`."""

from __future__ import annotations

import asyncio
import os
import sys

from handlers.vllm.handler import VllmHandler
from handlers.vllm.options import VllmOptions
from lmi_server.contract.errors import LmiServerError
from lmi_server.machine.environment import process_environment
from lmi_server.machine.inventory import this_machine

if __name__ == "__main__":
    given = dict(argument.split("=", 1) for argument in sys.argv[2:])
    recommended = VllmOptions.recommended(this_machine(process_environment()))
    raw = {key.removeprefix("option."): value for key, value in recommended.items()} | given
    passed_through = {name: raw.pop(name) for name in raw.keys() - VllmOptions.model_fields.keys()}
    options = VllmOptions.restore(raw, passed_through)
    os.environ.update(options.worker_environment())
    try:
        asyncio.run(VllmHandler().start(sys.argv[1], options))
    except LmiServerError as error:
        print(f"{error.kind}: {error.message}")
