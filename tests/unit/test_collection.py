"""Collecting the fast tests takes seconds, because their modules import no engine; the schedule names files."""

from __future__ import annotations

import subprocess
import sys

import pytest
from paths import ROOT, TESTS
from schedule import AS_ONE_FILE, LONGEST

FAST = ("unit", "configuration", "dialects", "artifacts", "commands", "worker", "http", "packaging")
SLOW_TO_IMPORT = {
    "accelerate",
    "boto3",
    "deepspeed",
    "huggingface_hub",
    "moto",
    "numba",
    "openai",
    "peft",
    "sentence_transformers",
    "sklearn",
    "skops",
    "torch",
    "transformers",
    "vllm",
    "xgboost",
}

# Prints the packages that importing the files given on the command line brings in.
_PROGRAM = """
import sys
from importlib.util import module_from_spec, spec_from_file_location

for number, path in enumerate(sys.argv[1:]):
    spec = spec_from_file_location(f"imported_{number}", path)
    sys.modules[spec.name] = module = module_from_spec(spec)
    spec.loader.exec_module(module)
print(*{name.partition(".")[0] for name in sys.modules})
"""


@pytest.mark.slow
def test_modules_of_fast_tests_import_no_engine() -> None:
    files = [str(path) for folder in FAST for path in sorted((TESTS / folder).glob("test_*.py"))]
    program = f"import sys; sys.path[:0] = {[str(TESTS / 'support'), str(ROOT)]}\n{_PROGRAM}"
    ran = subprocess.run([sys.executable, "-c", program, *files], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert SLOW_TO_IMPORT & set(ran.stdout.split()) == set()


def test_the_schedule_names_files_that_exist() -> None:
    assert [file for pair in AS_ONE_FILE.items() for file in pair if not (ROOT / file).is_file()] == []
    assert [start for start in LONGEST if not list(TESTS.glob(f"{start}*"))] == []


@pytest.mark.parametrize("libraries", ["transformers", "vllm"])
def test_files_whose_servers_fork_with_an_engine_run_in_one_process(libraries: str) -> None:
    """Each other process would import the engine again, for many seconds."""
    asks = f'libraries="{libraries}"'
    files = [path for path in TESTS.rglob("test_*.py") if asks in path.read_text(encoding="utf-8")]
    names = {path.relative_to(ROOT).as_posix() for path in files}
    assert len({AS_ONE_FILE.get(name, name) for name in names}) == 1, sorted(names)
