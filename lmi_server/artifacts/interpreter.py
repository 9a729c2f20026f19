"""The Python interpreter that the workers of a model run in.

It is the server's own unless the model names an interpreter, asks for its own virtual environment, or for another
version of its engine (`environments/`). The workers always run the code of this server. Another interpreter must bring
the packages that this code imports.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from lmi_server.artifacts.child_process import ChildTimeoutError, run_child
from lmi_server.artifacts.environments.environment import EngineEnvironment, EnvironmentMaker
from lmi_server.artifacts.environments.recipe import Recipe
from lmi_server.artifacts.progress import Activity
from lmi_server.artifacts.store import entry, fill
from lmi_server.artifacts.worker_code import worker_code
from lmi_server.contract.errors import ArtifactError, ConfigurationError
from lmi_server.contract.texts.quoting import excerpt

WORKER_PACKAGES: Mapping[str, str] = {"msgspec": "msgspec", "pydantic": "pydantic>=2.7", "uvloop": "uvloop"}
"""What every worker imports beside the standard library, and how pip calls it."""

_PIP_NAMES = {
    "optimum.neuron": "optimum-neuron",
    "sklearn": "scikit-learn",
    "tensorrt_llm": "tensorrt-llm",
    "transformers_neuronx": "transformers-neuronx",
    "vllm_neuron": "vllm-neuron",
}
_OLDEST = (3, 11)
_LIMIT_S = 120.0
# Prints what an interpreter is and lacks. Engines are looked for and not imported, because that may take a minute.
_PROBE = """
import importlib, importlib.util, json, sys
asked = json.loads(sys.argv[1])
def found(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:
        return False
broken = {}
missing = [name for name in asked["packages"] if not found(name)]
for name in asked["modules"] if not missing and sys.version_info[:2] >= tuple(asked["oldest"]) else ():
    try:
        importlib.import_module(name)
    except Exception as error:
        broken[name] = f"{type(error).__name__}: {error}"
print("\\n" + json.dumps({"version": list(sys.version_info[:3]), "missing": missing, "broken": broken}))
"""


@dataclass(frozen=True, slots=True)
class WorkerPython:
    """What a model asks for: an interpreter, None for the server's, and maybe a virtual environment of its own.

    `packages` are those of its engine, `modules` those of its handler. `recipe` is the environment of its engine, None
    if the interpreter has that.
    """

    executable: str | None = None
    own_environment: bool = False
    packages: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    recipe: Recipe | None = None


@dataclass(frozen=True, slots=True)
class Interpreter:
    """The path of an interpreter, and what must be on the PYTHONPATH for it to find the code of a worker.

    `environment` is what was made for the engine of the model, if anything.
    """

    path: str
    python_path: tuple[str, ...] = ()
    environment: EngineEnvironment | None = None


class _Venv(msgspec.Struct, frozen=True):
    """The manifest of a virtual environment: the interpreter that it was made with, and the model."""

    python: str
    model_dir: str


class _Probed(msgspec.Struct):
    """What an interpreter said of itself: its version, missing packages, and why each broken module fails."""

    version: tuple[int, ...]
    missing: list[str]
    broken: dict[str, str]


class Interpreters:
    """Finds and makes interpreters. `own` is the server's, `root` the directory of downloads."""

    def __init__(
        self,
        own: str,
        environment: Mapping[str, str],
        root: Path,
        environments: EnvironmentMaker,
        activity: Activity,
    ) -> None:
        self._environments = environments
        self._own = own
        self._environment = environment
        self._root = root
        self._activity = activity

    def prepare(self, wanted: WorkerPython, model_dir: Path) -> Interpreter:
        """Return the interpreter for the workers of a model.

        Raises ConfigurationError if there is none, or if it lacks what a worker imports, and ArtifactError if the
        virtual environment cannot be made.
        """
        if wanted.executable is None and wanted.recipe is None and not wanted.own_environment:
            return Interpreter(self._own)
        path = self._own if wanted.executable is None else self._find(wanted.executable, model_dir)
        code = worker_code(self._root)
        environment = None
        if wanted.recipe is not None:
            environment = self._environments.prepare(wanted.recipe, path, self._activity)
            path = environment.python
        if wanted.executable is not None or environment is not None:
            self._check(wanted, path, code)
        if wanted.own_environment:
            path = self._venv(path, model_dir)
        return Interpreter(path, (str(code),), environment)

    def _find(self, name: str, model_dir: Path) -> str:
        """Return the absolute path of the program `name`: a path, also relative to the model, or a name on the PATH."""
        beside = model_dir / name
        searched = str(beside) if os.sep in name and beside.is_file() else name
        path = shutil.which(searched, path=self._environment.get("PATH", os.defpath))
        if path is None:
            raise ConfigurationError(
                f'option.pythonExecutable = "{excerpt(name)}": there is no such program; name a Python 3.11 or later,'
                " or remove the key: workers then run in the Python of the server"
            )
        return os.path.abspath(path)

    def _check(self, wanted: WorkerPython, path: str, code: Path) -> None:
        # As workers have it (plan_pool.py): the server's PYTHONPATH brings nothing into an environment.
        inherited = self._environment.get("PYTHONPATH") if wanted.recipe is None else None
        modules = ["lmi_server.worker.__main__", *wanted.modules]
        found = self._probe(path, [*WORKER_PACKAGES, *wanted.packages], modules, code, inherited)
        place, install = f'option.pythonExecutable = "{wanted.executable}"', f"{path} -m pip install"
        if wanted.recipe is not None:
            place, install = wanted.recipe.asked_by, "lines of the file of option.engine_requirements:"
        version = found.version
        if version[:2] < _OLDEST:
            raise ConfigurationError(
                f"{place}: it is Python {'.'.join(map(str, version))}; a worker needs Python 3.11 or later"
            )
        if found.missing:
            names = " ".join(f"'{WORKER_PACKAGES.get(name) or _PIP_NAMES.get(name, name)}'" for name in found.missing)
            raise ConfigurationError(
                f"{place}: it lacks {', '.join(found.missing)}, which a worker of this model imports; install them "
                f"there: {install} {names}"
            )
        for module, reason in found.broken.items():
            raise ConfigurationError(
                f"{place}: a worker cannot import {module} there ({reason}); install what it lacks with "
                f"{install.removesuffix(':')}, or remove the key"
            )

    def _probe(
        self, path: str, packages: Sequence[str], modules: Sequence[str], code: Path, inherited: str | None
    ) -> _Probed:
        asked = json.dumps({"packages": packages, "modules": modules, "oldest": _OLDEST})
        variables = {"PYTHONPATH": os.pathsep.join([str(code), *([inherited] if inherited else [])])}
        printed = self._run([path, "-c", _PROBE, asked], variables).splitlines()
        try:  # its packages may print something, too
            return msgspec.json.decode(printed[-1] if printed else "", type=_Probed)
        except msgspec.MsgspecError as error:
            raise ArtifactError(f"{path}: a package there prints when Python ends; remove that package") from error

    def _venv(self, python: str, model_dir: Path) -> str:
        """Return the interpreter of the model's virtual environment, which also sees the packages of `python`."""
        place = entry(self._root, "venv", f"{model_dir}\0{python}\0{Path(python).stat().st_mtime_ns}", "venv")

        def make(_: int) -> _Venv:
            self._activity.report(f"making a virtual environment for {model_dir}")
            self._make_venv(python, place.partial_files)
            return _Venv(python, str(model_dir))

        return str(fill(place, _Venv, self._activity, make) / "bin" / "python")

    def _make_venv(self, python: str, directory: Path) -> None:
        self._run([python, "-m", "venv", "--without-pip", str(directory)], {})
        sites = json.loads(
            self._run([python, "-c", "import json, site; print(json.dumps(site.getsitepackages()))"], {})
        )
        packages = next(directory.glob("lib/python*/site-packages"))
        # `venv --system-site-packages` would show the packages of the Python that made `python`, if that is itself one
        # of a virtual environment.
        lines = [f"import site; site.addsitedir({site!r})\n" for site in sites]
        (packages / "of-the-server.pth").write_text("".join(lines))

    def _run(self, command: Sequence[str], variables: Mapping[str, str]) -> str:
        """Return what a command of an interpreter prints. Raises ArtifactError if it fails."""
        try:
            ended = run_child(
                command,
                # As -P, which Python before 3.11 refuses: no file of the working directory takes a module's place.
                environment={**self._environment, **variables, "PYTHONSAFEPATH": "1"},
                activity=self._activity,
                limit_s=_LIMIT_S,
            )
        except (ChildTimeoutError, OSError) as error:
            raise ArtifactError(f"option.pythonExecutable: {command[0]} cannot be run: {error}") from error
        if ended.code != 0:
            last = (ended.stderr.strip().splitlines() or ["it gave no reason"])[-1]
            raise ArtifactError(f"option.pythonExecutable: {command[0]} failed (exit code {ended.code}): {last}")
        return ended.stdout
