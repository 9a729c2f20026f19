"""skops, imported in a process that has imported transformers."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import pytest


def import_skops() -> ModuleType:
    """Import skops.io while transformers is out of its sight.

    skops asks every imported module for hundreds of names. Each question has transformers look through its modules and
    import some: ten seconds in all.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in list(sys.modules):
            if name.partition(".")[0] == "transformers":
                patch.delitem(sys.modules, name)
        return importlib.import_module("skops.io")
