"""What becomes of another server's configuration: the keys that are carried over, and a note on every part of it."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from lmi_server.configuration.resolve import inspect_model
from lmi_server.contract.texts.secrets import SECRETS, is_secret
from lmi_server.explain.findings import finding
from lmi_server.machine.inventory import Machine

Kind = Literal["carried", "differs", "not carried"]
NO_COUNTERPART = "there is no such setting here"

_MODEL_ID = "option.model_id"
_KEY = re.compile(r"[A-Za-z_][\w.]{0,100}", re.ASCII)
_TOKENS = re.compile(r"\b(hf_[A-Za-z0-9]{20,}|AKIA[A-Z0-9]{16}|sk-[\w-]{20,}|[Bb]earer \S+)")
# $NAME, ${NAME}, $(command) and `command` are the shell's; nothing here replaces or runs them.
_SUBSTITUTION = re.compile(r"\$(?:[\w({]|$)|`")
_CONTROL = re.compile(r"[\x00-\x1f\x7f\u0080-\u009f\u2028\u2029\u202a-\u202e\u2066-\u2069]+")
_ESCAPES = {"\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t", "\f": "\\f"}
_IDLE = re.compile(r"unknown key|\S+ has no effect")
_LONGEST_VALUE = 20_000
_LONGEST_SHOWN = 160


@dataclass(frozen=True, slots=True)
class Note:
    """What became of one part of the configuration, named by `origin`."""

    kind: Kind
    origin: str
    text: str


@dataclass(slots=True)
class Migration:
    """The result, as it grows: keys with values and origins, and the notes in the order of the source.

    `mounts` has the host's directory of each directory of a container.
    """

    source: str
    values: dict[str, str] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    mounts: dict[str, str] = field(default_factory=dict)

    def carry(self, origin: str, key: str, value: object, differs: str = "") -> None:
        """Carry a value over, unless it is secret, or the shell would replace it."""
        text = "true" if value is True else "false" if value is False else str(value).strip()
        if _KEY.fullmatch(key) is None or len(text) > _LONGEST_VALUE:
            self.drop(origin, "is no name of a setting, or its value is too long")
        elif is_secret(key) or holds_secret(text) or (key == "option.env" and _names_secret(text)):
            self.drop(origin, "it holds a secret, which no file should; give it in a variable of the server")
        elif _SUBSTITUTION.search(text):
            self.drop(origin, "the shell or docker compose puts in its value; write the value itself")
        else:
            self.values[key] = text
            self.origins[key] = origin
            self.note("differs" if differs else "carried", origin, f"{key}={text}{f': {differs}' if differs else ''}")

    def carry_model(self, origin: str, model: str) -> None:
        """Carry over where the weights are; a path in a container becomes that of the host."""
        for inside, outside in self.mounts.items():
            if model == inside or model.startswith(f"{inside.rstrip('/')}/"):
                self.carry(origin, _MODEL_ID, outside + model[len(inside.rstrip("/")) :], f"{inside} was a mount")
                return
        self.carry(origin, _MODEL_ID, model)

    def differ(self, origin: str, text: str) -> None:
        """Note what is done in another way here."""
        self.note("differs", origin, text)

    def drop(self, origin: str, reason: str = NO_COUNTERPART) -> None:
        """Note what cannot be carried over."""
        self.note("not carried", origin, reason)

    def note(self, kind: Kind, origin: str, text: str) -> None:
        self.notes.append(Note(kind, display_text(origin), display_text(text)))

    def text(self) -> str:
        """Return the content of serving.properties, with a comment above each key that says where it is from."""
        lines = [f"# By lmi-server migrate, from {display_text(self.source)}."]
        for key, value in self.values.items():
            lines += [f"# {display_text(self.origins[key])}", f"{key}={_escape(value)}"]
        return "\n".join((*lines, ""))

    def settle(self, machine: Machine, environment: Mapping[str, str], directory: Path | None = None) -> list[str]:
        """Take out what `check` refuses or finds useless, with a note, and return what else it says.

        The model itself stays: its path may be that of another machine.
        """
        with tempfile.TemporaryDirectory() as place:
            model_dir = directory if directory is not None and directory.is_dir() else Path(place)
            for _ in range(len(self.values) + 1):
                found = inspect_model(model_dir, environment, machine=machine, text=self.text())
                left = (*found.problems, *(line for line in found.warnings if _IDLE.search(line)))
                if not self._take_out(left):
                    break
            said = (*found.problems, *found.unavailable, *found.warnings)
            return [SECRETS.mask(finding("error", line).text.replace(place, "the model directory")) for line in said]

    def _take_out(self, lines: tuple[str, ...]) -> bool:
        """Take out the keys that these lines of `check` are about; return whether there were any."""
        texts = self.text().split("\n")
        reasons: dict[str, str] = {}
        for each in (finding("error", line) for line in lines):
            key = texts[each.line - 1].partition("=")[0] if each.line and each.line <= len(texts) else ""
            if key in self.values and key != _MODEL_ID:
                reasons.setdefault(key, each.text)
        self.notes = [note for note in self.notes if note.text.partition("=")[0] not in reasons]
        for key, reason in reasons.items():
            del self.values[key]
            self.drop(self.origins.pop(key), reason)
        return bool(reasons)


def holds_secret(text: str) -> bool:
    """Return whether a text holds a token, or a URL with a password or a signature."""
    return _TOKENS.search(text) is not None or SECRETS.mask(text) != text


def _names_secret(pairs: str) -> bool:
    """Return whether one of the variables in A=1,B=2 is secret by its name."""
    return any(is_secret(pair.partition("=")[0].strip()) for pair in pairs.split(","))


def display_text(text: str) -> str:
    """Return a text of the source for a report or a comment: one line, not long, without secrets."""
    plain = _CONTROL.sub(" ", SECRETS.mask(_TOKENS.sub("***", text[:10_000])))
    return plain if len(plain) <= _LONGEST_SHOWN else f"{plain[: _LONGEST_SHOWN - 3]}..."


def _escape(value: str) -> str:
    """Return a value as a file of properties has it: a line end in it begins no other key."""
    return "".join(_ESCAPES.get(character, character) for character in value)
