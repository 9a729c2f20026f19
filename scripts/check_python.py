"""Runs the fast tests that load no engine on another version of Python: `check_python.py PYTHON [PYTEST ARGUMENT...]`.

The environment is a folder of .venv that names the version. It has the server, its tools and its tests, but not torch:
which build of torch there is depends on the version and on the machine.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from setup_environment import CONSTRAINTS, PIP_TO_UV, ROOT, UV, VENV, extra, run, uv_environment

EXTRAS = ("test", "tls", "otel", "tune", "mpi", "sklearn", "tasks", "gguf", "hub", "s3")
# What the tests of tokenizers and kernels import, without the engine.
MORE = ("jinja2", "llguidance>=1.7,<2", "numba", "tokenizers", "transformers>=5.19,<6")
# These need torch or a browser.
LEFT_OUT = ("sentence-transformers", "playwright", "torch")
TESTS = ("tests/unit", "tests/configuration", "tests/dialects")
PROCESSES = ("-n", "2", "--dist", "loadfile")


def main() -> int:
    """Make the environment, and return pytest's exit code."""
    python, *arguments = sys.argv[1:]
    asked = [python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    version = run(asked, capture_output=True, text=True).stdout.strip()
    directory = VENV / f"python{version}"
    environment = uv_environment(PIP_TO_UV)
    if not (directory / "bin" / "python").exists():
        run([str(UV), "venv", "--quiet", "--python", python, str(directory)], env=environment)
    wanted = [name for each in EXTRAS for name in extra(each) if not name.startswith(LEFT_OUT)]
    install = [str(UV), "pip", "install", "--quiet", "--python", str(directory / "bin" / "python")]
    install += ["--constraint", str(CONSTRAINTS), "--editable", str(ROOT), *wanted, *MORE]
    run(install, env=environment)
    tests = arguments or ["-m", "not slow", "-p", "no:cacheprovider", *PROCESSES, *TESTS]
    command = [str(directory / "bin" / "python"), "-m", "pytest", *tests]
    return subprocess.run(command, cwd=Path(ROOT), env=dict(os.environ), check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
