"""Other servers that run the same code of one's own; the script of each starts it in an environment of its own.

A script is called with the port, a directory of its own for what the server writes, and how many
chunks to stream; 0 is to echo.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.relay import UnavailableError

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Peer:
    """A server to compare with; `path` is where it takes requests."""

    name: str
    path: str
    module: str
    requirements: tuple[str, ...]
    needs_torch: bool = False

    @property
    def script(self) -> Path:
        return Path(__file__).with_name(f"{self.module}.py")

    def python(self) -> Path:
        """Return an interpreter that has the peer, installing it the first time.

        Its own versions of what this server uses too stay out of the server's environment.

        Raises:
            UnavailableError: it can't be installed.
        """
        environment = ROOT / ".venv" / self.module
        python, installed = environment / "bin" / "python", environment / ".installed"
        if not installed.exists():
            _run(sys.executable, "-m", "venv", str(environment))
            pip = (str(python), "-m", "pip", "install", "-qq")
            if self.needs_torch:
                arguments = shlex.split(os.environ.get("TORCH_ARGS", ""))
                _run(*pip, "--constraint", str(ROOT / "constraints.txt"), *arguments, "torch")
            _run(*pip, *self.requirements)
            installed.touch()
        return python


PEERS = (
    Peer("LitServe", "/predict", "litserve_echo", ("litserve", "uvloop", "httptools")),
    Peer(
        "TorchServe", "/predictions/echo", "torchserve_echo",
        ("torchserve", "torch-model-archiver", "numpy", "pyyaml", "requests"), needs_torch=True,
    ),
    Peer("Ray Serve", "/", "ray_serve_echo", ("ray[serve]",)),
)  # fmt: skip


def _run(*command: str) -> None:
    finished = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if finished.returncode:
        lines = finished.stdout.strip().splitlines() or [f"exit code {finished.returncode}"]
        raise UnavailableError(f"not installed: {lines[-1]}")
