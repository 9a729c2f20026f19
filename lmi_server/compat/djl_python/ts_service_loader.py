"""The name of LMI's service of TorchServe's archives. It refuses to run."""

from __future__ import annotations

from typing import Any

from djl_python.not_here import not_here


class TorchServeService:
    """Cannot be made: archives of TorchServe are not served."""

    def __init__(self, service: Any, model_dir: str) -> None:
        not_here(type(self).__name__, "put a model.py with handle() beside the files of the archive")
