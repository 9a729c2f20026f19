"""The command of the container images: `lmi-server`, and all that a container of LMI can be told to run.

serve ARGUMENTS, djl-serving ARGUMENTS, -m MODEL ...    the server
check, explain, --help, ...                             the other commands of lmi-server
bash, python x.py, "a && b"                             anything else runs as it is
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence

from lmi_server.commands import start
from lmi_server.features import FEATURES

COMMANDS = frozenset(
    {
        "chat",
        "check",
        "demo-model",
        "devices",
        "explain",
        "partition",
        "reload",
        "serve",
        "test-model",
        "top",
        "version",
        *(name for feature in FEATURES for name in feature.commands),
    }
)
"""Names of lmi-server's own commands. They win over programs of the same name, such as `top` and `ray`."""

_SERVER = "djl-serving"  # LMI's name of the program
_SHELL = "/bin/sh"
_OF_ALL_COMMANDS = ("-h", "--help", "--version", "--install-completion", "--show-completion")


def program_of(arguments: Sequence[str]) -> list[str] | None:
    """Return the program to run with its arguments; None if it is lmi-server itself."""
    first = arguments[0] if arguments else ""
    if not first or first.startswith("-") or first in COMMANDS or first == _SERVER:
        return None
    if shutil.which(first) is not None:
        return list(arguments)
    # As with LMI, one text may hold a whole line of the shell.
    return [_SHELL, "-c", first] if len(arguments) == 1 and len(first.split()) > 1 else None


def arguments_of_server(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of lmi-server; options without a command are those of `serve`."""
    if not arguments:
        return ["serve"]
    first, *rest = arguments
    if first == _SERVER:
        return ["serve", *rest]
    return ["serve", *arguments] if first.startswith("-") and first not in _OF_ALL_COMMANDS else list(arguments)


def main() -> None:
    """Run the command that the container was started with."""
    arguments = sys.argv[1:]
    program = program_of(arguments)
    if program is not None:
        os.execvp(program[0], program)
    sys.argv[1:] = arguments_of_server(arguments)
    start.main()


if __name__ == "__main__":  # where the distribution, which has a script of that name, is not installed
    main()
