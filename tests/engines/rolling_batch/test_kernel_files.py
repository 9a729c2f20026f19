"""Files of compiled kernels: what is damaged, or what others can have written, is compiled anew; nothing is lost.

A process compiles small kernels and forks for each call, so that each call looks for compiled code anew.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from paths import ROOT

from handlers.cpu_kernels.compilation import kernel_files
from handlers.cpu_kernels.compilation.kernel_files import NotTrustedError

PROGRAM = """
import ctypes, json, logging, os, pickle, sys
import numpy as np
from numba import typeof
from numba.core import registry
from handlers.cpu_kernels.compilation import decorators, kernel_files

TYPES = ("int8", "int16", "int32", "int64", "uint8", "float32", "float64")
messages = []

class Collected(logging.Handler):
    def emit(self, record):
        messages.append(f"{record.levelname} {record.getMessage()}")

logging.getLogger().addHandler(Collected())

@decorators.kernel()
def double(numbers):
    numbers[0] *= 2

@decorators.kernel()
def triple(numbers):
    numbers[0] *= 3

labs = ctypes.CDLL(None).labs
labs.argtypes, labs.restype = [ctypes.c_long], ctypes.c_long

@decorators.kernel()
def at_address(numbers):
    numbers[0] = labs(numbers[0])

def call(kernel, element):
    numbers = np.array([7], element)
    kernel(numbers)
    return int(numbers[0])

def forked(work):
    process = os.fork()
    if process == 0:
        print(json.dumps(work()), flush=True)
        os._exit(0)
    return process

def called():
    result = call(double, "int64")
    return {"result": result, "hits": sum(double.stats.cache_hits.values()), "log": messages}

def all_called():
    return {"results": [call(double, each) for each in TYPES], "hits": sum(double.stats.cache_hits.values())}

def race():
    reading, writing = os.pipe()
    def compile_one(element):
        os.close(writing)
        os.read(reading, 1)  # ends with the parent's end of the pipe: all begin at once
        call(double, element)
        os._exit(0)
    processes = [forked(lambda: compile_one(element)) for element in TYPES]
    os.close(reading)
    os.close(writing)
    for process in processes:
        assert os.waitpid(process, 0)[1] == 0

def forge():
    cache, arguments = double._cache, (typeof(np.array([7])),)
    context = registry.cpu_target.target_context
    identity = cache._identity(arguments, context.codegen())
    kernel_files.write(cache._path(identity), kernel_files.signed(identity, pickle.dumps("this is no kernel")))

call(triple, "int64")
for line in sys.stdin:
    if line == "race\\n":
        race()
    elif line == "forge\\n":
        forge()
    elif line == "at_address\\n":
        print(json.dumps(call(at_address, "int64")), flush=True)
        continue
    else:
        os.waitpid(forked(all_called if line == "all\\n" else called), 0)
        continue
    print("null", flush=True)
"""


class Called(NamedTuple):
    """What a call of a kernel has said: 7 doubled, how often code was found, and the log."""

    result: int
    hits: int
    log: list[str]


class Caller:
    """A process that forks for each call, and the folder in which it keeps kernels."""

    def __init__(self, directory: Path) -> None:
        program = directory / "program.py"
        program.write_text(PROGRAM, encoding="utf-8")
        self._kept = directory / "kept"
        self._process = subprocess.Popen(
            [sys.executable, str(program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "NUMBA_CACHE_DIR": str(self._kept),
                "NUMBA_CACHE_LOCATOR_CLASSES": "UserProvidedCacheLocator",
            },
        )

    def ask(self, what: str) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def call(self) -> Called:
        return Called(**self.ask("call"))

    def file(self, name: str) -> Path:
        """Return the file of a kernel."""
        (found,) = self._kept.rglob(f"program.{name}_*.kernel")
        return found

    def files(self) -> list[Path]:
        return [path for path in self._kept.rglob("*") if path.is_file()]

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()


@pytest.fixture
def caller(tmp_path: Path) -> Iterator[Caller]:
    made = Caller(tmp_path)
    yield made
    made.close()


@pytest.fixture(scope="module")
def shared_caller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Caller]:
    made = Caller(tmp_path_factory.mktemp("caller"))
    yield made
    made.close()


class Hostile:
    """What executes code when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self._target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._target,)


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def replace_by_link(path: Path) -> None:
    path.rename(path.with_suffix(".linked"))
    path.symlink_to(path.with_suffix(".linked"))


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGED = "it is damaged, or another version wrote it"
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "random bytes": (lambda path: path.write_bytes(random.Random(1).randbytes(9000)), DAMAGED),
    "truncated": (lambda path: os.truncate(path, path.stat().st_size - 1), DAMAGED),
    "empty": (lambda path: os.truncate(path, 0), DAMAGED),
    "a bit flipped": (flip_a_bit, DAMAGED),
    "a hostile pickle": (lambda path: path.write_bytes(pickle.dumps(Hostile(path.parent / "executed"))), DAMAGED),
    "a link": (replace_by_link, "symbolic links"),
    "a pipe": (replace_by_pipe, "it is no regular file"),
    "writable for all": (lambda path: path.chmod(0o646), "every user can write it"),
}
OF_ROOT: dict[str, tuple[Callable[[Path], object], str]] = {
    "of another user": (lambda path: os.chown(path, 4711, 0), "it belongs to the user 4711"),
    "writable for a group": (lambda path: (os.chown(path, 0, 4711), path.chmod(0o664)), "the group 4711 can write it"),
}
if os.getuid() == 0:
    DAMAGES |= OF_ROOT


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_kernel_that_is_not_to_be_trusted_is_compiled_anew(shared_caller: Caller, damage: str) -> None:
    damaged_by, reason = DAMAGES[damage]
    shared_caller.call()
    path = shared_caller.file("double")
    damaged_by(path)
    result, hits, log = shared_caller.call()
    assert (result, hits, len(log)) == (14, 0, 1)
    assert log[0].startswith(f"WARNING the kernel in {path} is compiled anew: ")
    assert reason in log[0]
    assert shared_caller.call() == (14, 1, [])
    assert not (path.parent / "executed").exists()


@pytest.mark.slow
def test_code_with_an_address_of_its_process_is_not_kept(caller: Caller) -> None:
    assert caller.ask("at_address") == 7
    assert [file.name.split("_")[0] for file in caller.files()] == ["program.triple"]


def test_the_code_of_another_kernel_is_no_code_of_this_one(shared_caller: Caller) -> None:
    shared_caller.call()
    path = shared_caller.file("double")
    path.write_bytes(shared_caller.file("triple").read_bytes())
    result, hits, log = shared_caller.call()
    assert (result, hits) == (14, 0)
    assert DAMAGED in log[0]


def test_a_file_that_holds_no_kernel_is_compiled_anew(shared_caller: Caller) -> None:
    """Its digest is right, as after a change of numba that its version does not tell."""
    shared_caller.call()
    shared_caller.ask("forge")
    result, hits, log = shared_caller.call()
    assert (result, hits) == (14, 0)
    assert "TypeError" in log[0]
    assert shared_caller.call() == (14, 1, [])


@pytest.mark.slow
def test_a_kernel_that_cannot_be_kept_computes_all_the_same(caller: Caller) -> None:
    caller.call()
    path = caller.file("double")
    path.unlink()
    (path / "in the way").mkdir(parents=True)
    result, hits, log = caller.call()
    assert (result, hits) == (14, 0)
    assert [line.split(f"{path}")[0] for line in log] == [
        "WARNING the kernel in ",
        "WARNING each start compiles the kernel that ",
    ]
    assert not [file for file in caller.files() if file.name.endswith(".partial")]


@pytest.mark.slow
def test_processes_that_compile_a_kernel_for_different_types_at_once_keep_all_of_them(caller: Caller) -> None:
    caller.ask("race")
    assert caller.ask("all") == {"results": [14] * 7, "hits": 7}


def test_root_may_write_by_its_group_and_any_user_reads_what_root_wrote(tmp_path: Path) -> None:
    path = tmp_path / "file"
    kernel_files.write(path, b"code")
    path.chmod(0o664)
    if os.getuid() == 0:
        os.chown(path, 0, 0)
        assert kernel_files.read(path) == b"code"


def test_what_is_written_can_only_be_written_by_its_owner(tmp_path: Path) -> None:
    path, before = tmp_path / "file", os.umask(0)
    try:
        kernel_files.write(path, b"code")
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o644
    assert kernel_files.is_trusted(path)
    assert not kernel_files.is_trusted(tmp_path / "none")
    assert not kernel_files.is_trusted(tmp_path)


def test_any_change_of_what_is_signed_is_seen() -> None:
    drawn = random.Random(2)
    for _ in range(300):
        data = drawn.randbytes(drawn.randrange(40))
        signed = kernel_files.signed("identity", data)
        assert kernel_files.verified("identity", signed) == data
        place, end = drawn.randrange(len(signed)), drawn.randrange(len(signed))
        for changed in (
            signed[:place] + bytes([signed[place] ^ drawn.randrange(1, 256)]) + signed[place + 1 :],
            signed[:end],
            signed + b"\0",
            data,
        ):
            with pytest.raises(NotTrustedError):
                kernel_files.verified("identity", changed)
        with pytest.raises(NotTrustedError):
            kernel_files.verified("another", signed)
