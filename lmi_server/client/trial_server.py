"""A server that a command starts for itself: one process, in which each trial of a search registers the model anew."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlencode
from urllib.request import Request, urlopen

from lmi_server.client.server_calls import error_message
from lmi_server.contract.errors import ConfigurationError
from lmi_server.machine.ports import free_port
from lmi_server.processes.parents import end_with_parent
from lmi_server.processes.usage import find_listener

PARAMETERS = {
    "minWorkers": "min_worker",
    "maxWorkers": "max_worker",
    "batch_size": "batch_size",
    "max_batch_delay": "max_batch_delay",
    "job_queue_size": "job_queue_size",
    "load_on_devices": "device",
}
"""Parameters of a registration by key of serving.properties; keys with "option." are parameters as they are."""
MODEL = "trial"
"""The name of the model while it is tried."""

_PORTS = 3  # that are tried
_START_S = 60.0
_END_S = 60.0


class LoadFailedError(Exception):
    """A model does not load with the settings of a trial; the message says why."""


class TrialServer:
    """A server on this machine, at `url`; it ends with this process, however that ends."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, log: Path) -> None:
        self.url = url
        self._process = process
        self._log = log

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def load(self, model: str, settings: Mapping[str, str], timeout_s: float | None, name: str = MODEL) -> None:
        """Load the model as `name`, with `settings` in place of those of its serving.properties.

        The server answers when the model is ready or has failed. Raises LoadFailedError if it does not load within
        `timeout_s` or its own limit.
        """
        given = {PARAMETERS.get(key, key): value for key, value in settings.items()}
        query = {"url": model, "model_name": name, **given}
        if timeout_s is not None:
            query.setdefault("option.model_loading_timeout", str(int(timeout_s)))
        self._call("POST", f"/models?{urlencode(query)}", None if timeout_s is None else timeout_s + _END_S)

    def add_adapter(self, name: str, source: Path) -> None:
        """Register an adapter with the loaded model. Raises LoadFailedError if the server refuses it."""
        query = urlencode({"name": name, "src": str(source)})
        self._call("POST", f"/models/{quote(MODEL)}/adapters?{query}", _END_S)

    def unload(self) -> None:
        """Unload the model, if it is loaded."""
        with contextlib.suppress(LoadFailedError):
            self._call("DELETE", f"/models/{quote(MODEL)}", _END_S)

    def _call(self, method: str, path: str, timeout_s: float | None) -> None:
        request = Request(self.url + path, method=method)
        try:
            with urlopen(request, timeout=timeout_s) as answer:  # nosec B310
                answer.read()
        except HTTPError as error:
            raise LoadFailedError(error_message(error.read())) from error
        except (URLError, OSError) as error:
            raise LoadFailedError(f"the server does not answer: {error}; its log is {self._log}") from error


@contextlib.contextmanager
def trial_server(log: Path, choose_port: Callable[[], int] = lambda: free_port(None)) -> Iterator[TrialServer]:
    """Start a server without a model, which writes its log to `log`. Raises ConfigurationError if it does not start.

    Another process may take the port before the server does; then the server tries another port.
    """
    for _ in range(_PORTS):
        port = choose_port()
        process = _start(port, log)
        try:
            if _answers(process, port):
                yield TrialServer(process, f"http://127.0.0.1:{port}", log)
                return
        finally:
            _end(process)
    raise ConfigurationError(f"the server does not start; the end of its log, {log}:\n{_end_of(log)}")


def _start(port: int, log: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "lmi_server", "serve", "--host", "127.0.0.1", "--port", str(port)]
    try:
        with log.open("ab") as output:
            # A group of its own: Ctrl-C in the terminal is for the command, which ends the server itself.
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                preexec_fn=end_with_parent,
                process_group=0,
            )
    except OSError as error:
        raise ConfigurationError(f"the log of the server cannot be written: {error}") from error


def _answers(process: subprocess.Popen[bytes], port: int) -> bool:
    """Return whether the server answers before its time is over; another process may answer on the port."""
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), urlopen(f"http://127.0.0.1:{port}/health/live", timeout=5):  # nosec B310
            if find_listener("127.0.0.1", port) == process.pid:
                return True
        time.sleep(0.1)
    return False


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _end_of(log: Path) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-5:])
