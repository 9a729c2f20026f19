"""The token with which Ray joins a cluster that asks for one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lmi_server.machine.environment import set_variables

MODE = "RAY_AUTH_MODE"
_TOKEN = "RAY_AUTH_TOKEN"
_TOKEN_FILE = "RAY_AUTH_TOKEN_PATH"


def send_token(environment: Mapping[str, str]) -> None:
    """Have Ray send this user's token to the cluster that it joins, if the user has one and RAY_AUTH_MODE is not set.

    Ray makes a token in the home directory with the first cluster that it starts, and later clusters ask for it. But
    Ray sends it only with RAY_AUTH_MODE=token, so that a user could join the first cluster and not the next one. A
    cluster that asks for no token accepts one. Call this before Ray is imported, which reads the variable. See "Ray
    token authentication" in Ray's documentation.
    """
    if MODE not in environment and _has_token(environment):
        set_variables({MODE: "token"})


def _has_token(environment: Mapping[str, str]) -> bool:
    if environment.get(_TOKEN):
        return True
    own = Path(environment.get("HOME") or "~").expanduser() / ".ray" / "auth_token"
    return Path(environment.get(_TOKEN_FILE) or own).is_file()
