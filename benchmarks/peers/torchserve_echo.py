"""An echo, or a stream, in TorchServe with one worker: the handler, and the code that archives it and starts it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

QUIET = """<Configuration><Appenders><Console name="console"/></Appenders>
<Loggers><Root level="warn"><AppenderRef ref="console"/></Root></Loggers></Configuration>
"""


def handle(data: list[dict[str, Any]] | None, context: Any) -> list[Any] | None:
    """Answer a batch of one; the first call, which loads the model, has no data."""
    from ts.handler_utils.utils import send_intermediate_predict_response  # only TorchServe's worker has it

    if not data:
        return None
    chunks = context.get_request_header(0, "x-stream")
    if chunks is None:
        return [data[0]["body"]]
    *first, last = (json.dumps({"token": index}) + "\n" for index in range(int(chunks)))
    for chunk in first:
        send_intermediate_predict_response([chunk], context.request_ids, "", 200, context)
    return [last]


def start(port: int, directory: Path) -> None:
    """Replace this process by the server; it writes its logs to the working directory."""
    binaries = Path(sys.executable).parent
    archiver = [binaries / "torch-model-archiver", "--model-name", "echo", "--version", "1", "--handler", __file__]
    subprocess.run([*archiver, "--export-path", directory], check=True)
    (directory / "log4j2.xml").write_text(QUIET)
    settings = {
        "inference_address": f"http://127.0.0.1:{port}",
        "management_address": f"http://127.0.0.1:{_free_port()}",
        "metrics_address": f"http://127.0.0.1:{_free_port()}",
        "grpc_inference_port": _free_port(),
        "grpc_management_port": _free_port(),
        "default_workers_per_model": 1,
        "disable_system_metrics": "true",
    }
    (directory / "config.properties").write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
    os.chdir(directory)
    os.environ |= {"TMPDIR": str(directory), "TEMP": str(directory)}
    path = f"{binaries}{os.pathsep}{os.environ['PATH']}"
    arguments = "torchserve --start --foreground --no-config-snapshots --disable-token-auth --model-store . "
    arguments += "--models echo=echo.mar --ts-config config.properties --log-config log4j2.xml"
    os.execve(binaries / "torchserve", arguments.split(), os.environ | {"PATH": path})


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    start(int(sys.argv[1]), Path(sys.argv[2]))
