"""Wheels of packages that this environment has, so that a test can install them elsewhere without an index."""

from __future__ import annotations

import zipfile
from importlib.metadata import distribution
from pathlib import Path, PurePosixPath

WORKER = ("annotated-types", "msgspec", "pydantic", "pydantic-core", "typing-extensions", "typing-inspection", "uvloop")
"""What a worker needs, and what that brings."""


def write_installed(directory: Path, *names: str) -> None:
    """Write a wheel of each installed package into `directory`, without the programs that it has."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in names:
        found = distribution(name)
        tag = next(line for line in (found.read_text("WHEEL") or "").splitlines() if line.startswith("Tag: "))
        files = [file for file in found.files or () if ".." not in file.parts and file.suffix != ".pyc"]
        plain = found.name.replace("-", "_")
        with zipfile.ZipFile(directory / f"{plain}-{found.version}-{tag.removeprefix('Tag: ')}.whl", "w") as wheel:
            for file in files:
                if PurePosixPath(file).name not in ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json"):
                    wheel.write(str(found.locate_file(file)), str(file))
            info = next(file.parts[0] for file in files if file.parts[0].endswith(".dist-info"))
            record = "".join(f"{written},,\n" for written in (*wheel.namelist(), f"{info}/RECORD"))
            wheel.writestr(f"{info}/RECORD", record)
