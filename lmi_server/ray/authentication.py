"""The token with which Ray joins a cluster that asks for one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lmi_server.machine.environment import set_variables

MODE = "RAY_AUTH_MODE"
_TOKEN = "RAY_AUTH_TOKEN"
_TOKEN_FILE = "RAY_AUTH_TOKEN_PATH"


def send_token(environment: Mapping[str, str]) -> None:
    """Have Ray send this user's token to the cluster that it joins, if there is one and RAY_AUTH_MODE is not set.

    `ray start` lets a cluster ask for the token as soon as there is one, and Ray makes one in the home directory for
    the first cluster that it starts by itself. But whoever joins sends it only with RAY_AUTH_MODE=token, so that the
    first cluster of a user could be joined, and the next one not. A cluster that asks for none takes it all the same.
    Ray reads the variable when it is imported, so call this before. The variables are those of Ray's documentation,
    "Ray token authentication".
    """
    if MODE not in environment and _has_token(environment):
        set_variables({MODE: "token"})


def _has_token(environment: Mapping[str, str]) -> bool:
    if environment.get(_TOKEN):
        return True
    own = Path(environment.get("HOME") or "~").expanduser() / ".ray" / "auth_token"
    return Path(environment.get(_TOKEN_FILE) or own).is_file()
