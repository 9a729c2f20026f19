"""Runs uv. It reads its own variables, and the files of configuration of the user and of the machine; what only pip is
set to is handed over.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from lmi_server.artifacts.child_process import ChildTimeoutError, run_child
from lmi_server.artifacts.progress import Activity
from lmi_server.artifacts.store import no_room
from lmi_server.contract.errors import ArtifactError, ConfigurationError

NO_UV = "uv, which makes environments, is not installed; run: pip install lmi-server[environments], or remove the key"
_REASON_LINES = 12
_DRAWN = " \t\u00b7\u00d7\u2500\u2502\u251c\u2570\u25b6"  # in the trees of uv's messages
_LISTING_S = 60.0
# pip's settings by uv's variable, and what separates the values of a list there.
_OF_PIP = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "constraint": ("UV_CONSTRAINT", " "),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "cert": ("SSL_CERT_FILE", " "),
    "timeout": ("UV_HTTP_TIMEOUT", " "),
    "default-timeout": ("UV_HTTP_TIMEOUT", " "),
    "proxy": ("ALL_PROXY", " "),
}
_TRUE = ("y", "yes", "t", "true", "on", "1")
_ANYWHERE = Path("/")  # uv looks for uv.toml from its directory upwards: in no folder that others may write to


def find_uv(environment: Mapping[str, str]) -> str | None:
    """Return the path of uv: beside the server's interpreter, or on the PATH; None if there is none."""
    beside = str(Path(sys.executable).parent)
    path = os.pathsep.join([beside, environment.get("PATH", os.defpath)])
    return shutil.which("uv", path=path)


class Uv:
    """Runs uv for one environment. `about` names that in messages, `limit_s` is the time that each command has.

    A command ends if it leaves less than `keep_free` bytes of the disk free. Raises ConfigurationError if uv is not
    installed.
    """

    def __init__(
        self, environment: Mapping[str, str], about: str, limit_s: float, activity: Activity, keep_free: int = 0
    ) -> None:
        path = find_uv(environment)
        if path is None:
            raise ConfigurationError(f"{about}: {NO_UV}")
        self._path = path
        self._environment = environment
        self._about = about
        self._limit_s = limit_s
        self._activity = activity
        self._keep_free = keep_free

    def run(
        self, arguments: Sequence[str], variables: Mapping[str, str], directory: Path, inherited: Sequence[int] = ()
    ) -> None:
        """Run one command, which writes to `directory`. Raises ArtifactError with uv's last lines if it fails."""

        def tick() -> None:
            self._activity.report(f"installing {self._about}")
            if shutil.disk_usage(directory).free < self._keep_free:
                raise ArtifactError(no_room(directory))

        try:
            ended = run_child(
                [self._path, *arguments],
                environment={**self._environment, **variables},
                activity=self._activity,
                directory=_ANYWHERE,
                limit_s=self._limit_s,
                inherited=inherited,
                on_tick=tick,
            )
        except ChildTimeoutError:
            raise ArtifactError(
                f"{self._about}: uv did not end within model_loading_timeout={self._limit_s:g} seconds; raise it, or "
                "put the wheels into wheelhouse/ beside the model"
            ) from None
        except OSError as error:
            raise ArtifactError(f"{self._about}: {self._path} cannot be started: {error}") from error
        if ended.code != 0 and "No space left on device" in ended.stderr:
            raise ArtifactError(no_room(directory))
        if ended.code != 0:
            raise ArtifactError(
                f"{self._about}: uv could not install it (exit code {ended.code}): {_end(ended.stderr)}"
            )

    def settings_of_pip(self, python: str) -> tuple[dict[str, str], tuple[str, ...]]:
        """Return uv's variables for what pip of the interpreter `python` is set to, unless they are set already.

        Return with them the arguments of an installation for what uv has no variable for.
        """
        command = [python, "-P", "-m", "pip", "config", "list"]
        try:
            listed = run_child(
                command, environment=self._environment, activity=self._activity, limit_s=_LISTING_S
            ).stdout
        except (ChildTimeoutError, OSError):
            return {}, ()
        found: dict[str, str] = {}
        arguments: tuple[str, ...] = ()
        for line in listed.splitlines():  # global.find-links='/a /b', :env:.find-links='/a'
            setting, _, value = line.partition("=")
            key = setting.rpartition(".")[2]
            if key == "no-index" and self._environment.keys().isdisjoint(("UV_DEFAULT_INDEX", "UV_INDEX")):
                arguments = ("--no-index",) if value.strip("'\"").lower() in _TRUE else ()
            name, separator = _OF_PIP.get(key, ("", ""))
            if name and name not in self._environment:
                found[name] = separator.join(value.strip("'\"").replace("\\n", " ").split())
        if "UV_INDEX" in found:  # pip takes the best version of all its indexes
            found.setdefault("UV_INDEX_STRATEGY", self._environment.get("UV_INDEX_STRATEGY", "unsafe-best-match"))
        return found, arguments


def _end(text: str) -> str:
    """Return the last lines of uv's messages in one line, without the marks of its drawing."""
    lines = [line.strip(_DRAWN) for line in text[max(0, text.find("error:")) :].splitlines()]
    return " ".join([line for line in lines if line][-_REASON_LINES:]) or "uv gave no reason"
