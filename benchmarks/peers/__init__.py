"""Other servers that run the same echo code. A script per server starts it in its own virtual environment.

The arguments of a script are the port, a directory for what the server writes, and the number of chunks to stream; 0
means to echo.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.servers import UnavailableError

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Peer:
    """A server to compare with; `path` is the path that it serves."""

    name: str
    path: str
    module: str
    requirements: tuple[str, ...]
    needs_torch: bool = False

    @property
    def script(self) -> Path:
        return Path(__file__).with_name(f"{self.module}.py")

    def python(self) -> Path:
        """Return an interpreter that has the peer installed; the first call installs it.

        The peer has its own environment, because it may need other versions of packages that this server uses.

        Raises:
            UnavailableError: it cannot be installed.
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
