"""`lmi-server serve` with the variables of the container's image, and /opt/ml/model in another place."""

from __future__ import annotations

import contextlib
import os
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path

import httpx
from forked_servers import ForkedCommand
from paths import ROOT
from process_log import LIMIT_S, ProcessLog
from waiting import wait_until

_SETTING = re.compile(r"\b(SERVING_\w+)=([^\s\\]+)")


class Container:
    """A server that has been started as SageMaker starts it: with the one argument `serve`, and variables.

    `opt_ml` stands for /opt/ml; the model is in the directory model/ below it.
    """

    def __init__(self, opt_ml: Path, **variables: str) -> None:
        self.opt_ml = opt_ml
        self.process = ForkedCommand(["serve"], environment(opt_ml) | variables, opt_ml)
        self._output, self._errors = ProcessLog(self.process.stdout), ProcessLog(self.process.stderr)
        self.lines, self.errors = self._output.lines, self._errors.lines

    def listen(self) -> httpx.Client:
        """Wait until the server listens, and return a client of it."""
        url = self._output.wait_for(r"listening on (http://\S+)")[1]
        return httpx.Client(base_url=url, timeout=LIMIT_S)

    def log_line(self, pattern: str) -> str:
        return self._output.wait_for(pattern)[0]

    def stop(self) -> int:
        """Send SIGTERM, as the platform does, and return the exit code."""
        self.process.terminate()
        return self.ended()

    def ended(self) -> int:
        """Wait for the end; return the exit code. `lines` and `errors` then hold all that was printed."""
        code = self.process.wait(LIMIT_S)
        self._output.close()
        self._errors.close()
        return code


def environment(opt_ml: Path) -> dict[str, str]:
    """Return the variables of the image, with directories of a test in place of the image's own, and a free port."""
    kept = {name: os.environ[name] for name in ("PATH", "NO_PROXY", "no_proxy") if name in os.environ}
    of_image = dict(_SETTING.findall((ROOT / "docker/Dockerfile").read_text()))
    return (
        kept
        | of_image
        | {
            "PYTHONPATH": str(ROOT),
            "HOME": str(opt_ml),
            "XDG_CACHE_HOME": str(opt_ml / "cache"),
            "MODEL_SERVER_HOME": str(opt_ml / "djl"),
            "SERVING_HOST": "127.0.0.1",
            "SERVING_MODEL_STORE": str(opt_ml / "model"),
            "SERVING_PORT": "0",
        }
    )


@contextlib.contextmanager
def started(opt_ml: Path, **variables: str) -> Iterator[tuple[Container, httpx.Client]]:
    """Start a container and stop it at the end, unless the test has."""
    container = Container(opt_ml, **variables)
    try:
        with container.listen() as http:
            yield container, http
    finally:
        if container.process.returncode is None:
            container.stop()


@contextlib.contextmanager
def ready(opt_ml: Path, **variables: str) -> Iterator[tuple[Container, httpx.Client]]:
    """Start a container, and wait until the platform would send it requests."""
    with started(opt_ml, **variables) as (container, http):
        wait_until(lambda: http.get("/ping").status_code == 200, "/ping is 200")
        yield container, http


def refused(opt_ml: Path, **variables: str) -> tuple[int, list[str]]:
    """Start a container that cannot serve; return its exit code and what it printed that is no plain information."""
    container = Container(opt_ml, **variables)
    code = container.ended()
    assert container.errors == []
    return code, [line.rstrip("\n") for line in container.lines if " INFO " not in line]


def write(directory: Path, **files: str) -> Path:
    """Write files into a directory: `code__inference_py` is code/inference.py."""
    for name, text in files.items():
        path = directory / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return directory


def packed(directory: Path, archive: Path) -> Path:
    """Pack what is in `directory` as SageMaker's model.tar.gz has it: without a folder around it."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(directory, ".")
    return archive
