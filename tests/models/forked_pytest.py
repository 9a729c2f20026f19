"""The processes of pytest-xdist as forks: `python forked_pytest.py PATHS ARGUMENTS... FD`.

PATHS is sys.path as JSON, ARGUMENTS are those of pytest, and `fork_requests.py` connects to the socket FD. This process
collects the tests once, and so imports what all of them do. A fork collects them again, in a fifth of the time.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import re
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import NoReturn

import fork_requests
import pytest

from lmi_server.processes.parents import end_with_parent

# What several files of tests import within their functions, by how they name it.
_IMPORTED_LATE = {
    "anthropic": r"^ +(?:from|import) anthropic\b",
    "moto.server": r"^from artifact_helpers import .*\bs3_server\b",
    "moto.s3.responses": r"^from artifact_helpers import .*\bs3_server\b",
    "openai": r"^ +(?:from|import) openai\b",
    "playwright.sync_api": r"^ +from playwright\b",
}
_BY_ITSELF = ("-n0", "--collect-only", "-q", "-p", "no:cacheprovider")


class _Collection:
    """Imports what the tests will, and forgets the modules whose import an error or a skip has ended.

    Each fork imports and reports those itself.
    """

    def __init__(self) -> None:
        self._files: set[str] = set()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if not report.passed:
            self._files.add(report.nodeid.partition("::")[0])

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Import what several of the chosen files would import, each process for itself."""
        texts = [file.read_text(encoding="utf-8") for file in {item.path for item in session.items}]
        for name, pattern in _IMPORTED_LATE.items():
            users = sum(re.search(pattern, text, re.MULTILINE) is not None for text in texts)
            if users > 1 and find_spec(name.partition(".")[0]) is not None:
                import_module(name)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        files = {str(session.config.rootpath / file) for file in self._files}
        for name, module in list(sys.modules.items()):
            if getattr(module, "__file__", None) in files:
                del sys.modules[name]


def main(listening: int, paths: str, arguments: Sequence[str]) -> None:
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.path[:] = json.loads(paths)
    before = dict(os.environ)
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        pytest.main([*arguments, *_BY_ITSELF], [_Collection()])
    gc.freeze()
    imported = {name: value for name, value in os.environ.items() if before.get(name) != value}
    be(fork_requests.Forks(socket.socket(fileno=listening)).next_fork(), imported)


def be(asked: fork_requests.Asked, imported: Mapping[str, str]) -> NoReturn:
    """Be the `python -c PROGRAM` that was asked for, from its start to its end.

    `imported`: variables that modules set when they were imported. A fork does not import these modules again.
    """
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.chdir(asked.directory)
        os.environ.clear()
        os.environ.update({**asked.variables, **imported})
        for number, file in enumerate(asked.files):
            os.dup2(file, number)
            os.close(file)
        threads = os.environ.get("OMP_NUM_THREADS", "")
        if "torch" in sys.modules and threads.isdecimal() and threads != "1":
            sys.modules["torch"].set_num_threads(int(threads))  # it was imported with another number
        *_, program = asked.words
        sys.argv = ["-c"]
        sys.modules["__main__"] = ModuleType("__main__")
        exec(program, vars(sys.modules["__main__"]))
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:  # noqa: BLE001 - a fork must not go on as the process that forks
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]  # waits for other threads, as an interpreter does
        atexit._run_exitfuncs()
        os._exit(code)


if __name__ == "__main__":
    main(int(sys.argv[-1]), sys.argv[1], sys.argv[2:-1])
