"""What the installed TensorRT-LLM has, read from its files: importing the package takes seconds and starts CUDA.

Version 1.2 made PyTorch what NVIDIA supports; a later one left the engines of TensorRT out altogether.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from lmi_server.files.python_source import parse

Backend = Literal["tensorrt", "pytorch"]

FIRST_ON_PYTORCH = (1, 2)
INSTALL_OLDER = 'pip install "tensorrt-llm<1.2"'
"""The command for the versions that build engines of TensorRT."""

_VERSION = "version.py"
_ENGINES = "_tensorrt_engine"  # a folder; a module in 1.0's release candidates
_ARGUMENTS = "llmapi/llm_args.py"


@dataclass(frozen=True, slots=True)
class Package:
    """A package in the folder `root`; without a folder it stands for the newest version."""

    root: Path | None = None

    @property
    def version(self) -> str:
        """Return the version, "" if the package says none."""
        found = re.search(r"""^__version__ = ["']([^"']+)["']""", self._text(_VERSION), re.MULTILINE)
        return found.group(1) if found else ""

    @property
    def builds_engines(self) -> bool:
        root = self.root
        return root is not None and ((root / _ENGINES).is_dir() or (root / f"{_ENGINES}.py").is_file())

    @property
    def backend(self) -> Backend:
        """Return what the package runs models on unless it is told otherwise."""
        return "tensorrt" if self.builds_engines and _release(self.version) < FIRST_ON_PYTORCH else "pytorch"

    def argument_names(self) -> frozenset[str]:
        """Return the fields of the classes of arguments."""
        body = parse(self._text(_ARGUMENTS)).body
        classes = (node for node in body if isinstance(node, ast.ClassDef) and node.name.endswith("LlmArgs"))
        return frozenset(
            ast.unparse(field.target) for node in classes for field in node.body if isinstance(field, ast.AnnAssign)
        )

    def _text(self, name: str) -> str:
        path = None if self.root is None else self.root / name
        return path.read_text(encoding="utf-8") if path is not None and path.is_file() else ""


def installed() -> Package:
    """Return the package that this process would import; without one, what the newest has."""
    spec = find_spec("tensorrt_llm")
    return Package(None if spec is None or spec.origin is None else Path(spec.origin).parent)


def _release(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version; one that says none counts as the newest."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return tuple(map(int, found.groups())) if found else FIRST_ON_PYTORCH


def to_have_engines() -> str:
    """Return in words what a user does to have an engine of TensorRT."""
    if installed().builds_engines:
        return "set option.backend=tensorrt"
    return f"set option.backend=tensorrt after {INSTALL_OLDER}"
