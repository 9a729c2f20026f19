"""Shorter ways to what transformers finds out while it is imported: the installed packages, and its own modules.

Together they save about 0.8 s of processor time, and the results are the same. A version of transformers without these
functions is imported as it is.
"""

from __future__ import annotations

import csv
import functools
import importlib.metadata
import re
from collections import defaultdict
from importlib.machinery import SourceFileLoader
from importlib.metadata import Distribution
from types import ModuleType

_NAME = re.compile(r"^Name: *(\S+)", re.MULTILINE)


class ScanningLoader(SourceFileLoader):
    """Executes transformers.utils.import_utils, and has its functions read each file once."""

    def exec_module(self, module: ModuleType) -> None:
        usual = importlib.metadata.packages_distributions
        importlib.metadata.packages_distributions = packages_distributions
        try:
            super().exec_module(module)
        finally:
            importlib.metadata.packages_distributions = usual
        # The cache of transformers has room for 128 directories. There are more, and each is scanned twice.
        scan = getattr(getattr(module, "create_import_structure_from_path", None), "__wrapped__", None)
        if scan is not None:
            vars(module)["create_import_structure_from_path"] = functools.cache(scan)
        # It looks for the last line that begins with __all__, in a list of all lines.
        exported = getattr(module, "fetch__all__", None)
        if exported is not None:
            vars(module)["fetch__all__"] = lambda content: exported(content[content.rfind("\n__all__") + 1 :])


def packages_distributions() -> dict[str, list[str]]:
    """Return what the function of this name in importlib.metadata does, without an object for each installed file."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for distribution in importlib.metadata.distributions():
        declared = (distribution.read_text("top_level.txt") or "").split()
        for package in declared or _top_level(distribution):
            found[package].append(_name(distribution))
    return dict(found)


def _top_level(distribution: Distribution) -> set[str]:
    record = distribution.read_text("RECORD")
    if record is None:
        files = [str(file) for file in distribution.files or ()]
    else:
        files = [row[0] for row in csv.reader(record.splitlines()) if row]
    return {file.partition("/")[0].removesuffix(".py") for file in files if file.endswith(".py")}


def _name(distribution: Distribution) -> str:
    found = _NAME.search(distribution.read_text("METADATA") or "")
    return distribution.metadata["Name"] if found is None else found[1]
