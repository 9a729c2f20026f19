"""Virtual environments with a built wheel of this project and nothing that its metadata does not ask for."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

from paths import ROOT


def setup_script() -> ModuleType:
    """Import scripts/setup_environment.py, which is in no package."""
    spec = importlib.util.spec_from_file_location("setup_environment", ROOT / "scripts" / "setup_environment.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def uv(*arguments: str | Path) -> str:
    """Run uv with its cache alone, or else with the indexes that pip is configured with; return what it printed.

    `make setup` has filled the cache. Some indexes have uv ask for each package again, and compile what has no wheel.
    """
    command = [str(Path(sys.executable).with_name("uv")), *map(str, arguments)]
    environment = {**os.environ, **settings_of_pip(), "UV_OFFLINE": "1"}
    environment.pop("VIRTUAL_ENV", None)
    run = functools.partial(subprocess.run, command, capture_output=True, text=True, check=False, timeout=600)
    done = run(env=environment)
    if done.returncode != 0:
        done = run(env={**environment, "UV_OFFLINE": "0"})
    assert done.returncode == 0, done.stderr
    return done.stdout


@functools.cache
def settings_of_pip() -> dict[str, str]:
    """Return uv's variables for what pip is configured with; to ask pip takes a third of a second of a processor."""
    script = setup_script()
    found: dict[str, str] = script.uv_environment(script.PIP_TO_UV)
    return {name: value for name, value in found.items() if value != os.environ.get(name)}


def build(directory: Path) -> tuple[Path, Path]:
    """Build the sdist, and the wheel from it; return both paths."""
    uv("build", "--quiet", ROOT, "--out-dir", directory)
    (sdist,), (wheel,) = directory.glob("*.tar.gz"), directory.glob("*.whl")
    return sdist, wheel


def make_environment(directory: Path, wheel: Path, *extras: str) -> Path:
    """Install `wheel` with `extras` into a virtual environment, and nothing else; return its directory of commands.

    In one that is there, packages that are not asked for are removed, and the others stay.
    """
    if not directory.exists():
        uv("venv", "--quiet", "--python", sys.executable, directory)
    wanted = f"{wheel}[{','.join(extras)}]" if extras else str(wheel)
    script = setup_script()
    pins = ("--constraint", script.CONSTRAINTS, "--overrides", script.OVERRIDES)
    uv("pip", "install", "--quiet", "--exact", "--python", directory / "bin" / "python", *pins, wanted)
    return directory / "bin"


class SharedEnvironment:
    """A virtual environment that tests use one after the other, each with its extras and nothing else.

    `variables` are those of its programs: they find no checkout, and the bytecode of what is installed.
    """

    def __init__(self, directory: Path, wheel: Path) -> None:
        self._directory = directory / "venv"
        self.commands = self._directory / "bin"
        self._wheel = wheel
        self._extras: tuple[str, ...] | None = None
        self._bytecode = Bytecode(directory / "bytecode", self._directory)
        others = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        self.variables = {**others, "PYTHONPYCACHEPREFIX": str(directory / "bytecode")}

    def with_extras(self, *extras: str) -> Path:
        """Install these extras, remove all others, and return the directory of the commands."""
        if extras != self._extras:
            self._extras = None  # should the installation fail
            make_environment(self._directory, self._wheel, *extras)
            self._bytecode.link()
            self._extras = extras
        return self.commands

    def add(self, package: str) -> None:
        """Install a package without what it needs; the next other extras remove it."""
        uv("pip", "install", "--quiet", "--no-deps", "--python", self.commands / "python", package)


class Bytecode:
    """A PYTHONPYCACHEPREFIX for another environment, of links to the bytecode of this one.

    To compile torch and transformers again would take most of the time of a test. Python reads bytecode only if its
    source has the same size and time, as the files have that uv installs from its cache. It replaces a link to any
    other bytecode, and leaves the file alone.
    """

    def __init__(self, prefix: Path, environment: Path) -> None:
        self._prefix = str(prefix)
        self._ours = sysconfig.get_path("purelib")
        self._theirs = str(environment / Path(self._ours).relative_to(sys.prefix))
        self._linked: set[str] = set()
        library = sysconfig.get_path("stdlib")
        self._link_below(library, library, left_out=("site-packages", "test"))

    def link(self) -> None:
        """Link the bytecode of the packages that have been installed since the last call."""
        for name in {*os.listdir(self._theirs), "__pycache__"} - self._linked:
            self._linked.add(name)
            self._link_below(os.path.join(self._ours, name), os.path.join(self._theirs, name))

    def _link_below(self, ours: str, theirs: str, left_out: tuple[str, ...] = ()) -> None:
        for folder, folders, names in os.walk(ours):
            folders[:] = [name for name in folders if name not in left_out]
            if folder.endswith("__pycache__"):
                source = os.path.dirname(theirs + folder.removeprefix(ours))
                os.makedirs(self._prefix + source, exist_ok=True)
                for name in names:
                    with contextlib.suppress(FileExistsError):  # a program has written it meanwhile
                        os.symlink(os.path.join(folder, name), os.path.join(self._prefix + source, name))
