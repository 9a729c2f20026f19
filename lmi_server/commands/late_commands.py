"""Commands of `lmi-server` whose modules are imported once they are called, or shown in the help.

`python -m benchmarks.command_starts` measures what that saves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, cast

import typer
from typer.core import TyperCommand, TyperGroup

from lmi_server.features import FEATURES, load

_Command = TyperCommand | TyperGroup

_OF_THE_CORE = {
    "chat": "lmi_server.commands.live.chat:chat",
    "top": "lmi_server.commands.live.top:top",
    "reload": "lmi_server.commands.reload:reload_model",
}


class LateCommands(MutableMapping[str, _Command]):
    """Commands by name: first the present ones, then the ones that are imported late."""

    def __init__(self, present: Mapping[str, _Command], late: Mapping[str, str]) -> None:
        self._paths = late
        self._commands: dict[str, _Command | None] = {**present, **dict.fromkeys(late)}

    def __getitem__(self, name: str) -> _Command:
        command = self._commands[name]
        if command is None:
            command = self._commands[name] = _command(name, load(self._paths[name]))
        return command

    def __setitem__(self, name: str, command: _Command) -> None:
        self._commands[name] = command

    def __delitem__(self, name: str) -> None:
        del self._commands[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._commands)

    def __len__(self) -> int:
        return len(self._commands)


def _command(name: str, made_of: object) -> _Command:
    """Return the command that a function is, or a Typer with commands of its own."""
    app = typer.Typer(add_completion=False)
    app.callback()(lambda: None)  # Typer would make an app of one function that function, without its name
    if isinstance(made_of, typer.Typer):
        app.add_typer(made_of, name=name)
    else:
        app.command(name)(cast("Any", made_of))
    return cast("_Command", cast("TyperGroup", typer.main.get_command(app)).commands[name])


class WithLateCommands(TyperGroup):
    """The group of all commands; those of features take the place of commands of the core with their names."""

    def __init__(self, *, commands: Mapping[str, _Command], **settings: Any) -> None:
        of_features = {name: path for feature in FEATURES for name, path in feature.commands.items()}
        super().__init__(**settings)
        self.commands = cast("Any", LateCommands(commands, {**_OF_THE_CORE, **of_features}))
