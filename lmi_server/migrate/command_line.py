"""Takes a command line apart as the shell would, without running, expanding or replacing anything."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from lmi_server.contract.errors import ConfigurationError
from lmi_server.contract.texts.secrets import is_secret

LONGEST = 262144
"""Characters of a command line."""
MAX_WORDS = 5000
"""Words of a command line."""
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL | re.ASCII)
_OPERATOR = re.compile(r"[();<>|&]+")
_PREFIXES = frozenset({"sudo", "env", "exec", "nohup", "time", "export", "command", "nice"})
_SHELLS = re.compile(r"(?:.*/)?(?:ba|da|z)?sh")
_PYTHON = re.compile(r"(?:.*/)?python[\d.]*")
_CONTAINERS = re.compile(r"(?:.*/)?(?:docker|podman|nerdctl)")
_BARE_CONTAINER_FLAGS = frozenset(
    [
        "--rm",
        "-d",
        "--detach",
        "-i",
        "-t",
        "-it",
        "-ti",
        "-dit",
        "-itd",
        "-td",
        "--interactive",
        "--tty",
        "--init",
        "--privileged",
        "-P",
        "--publish-all",
        "--read-only",
        "--no-healthcheck",
        "--sig-proxy",
        "--oom-kill-disable",
    ]
)
_NUMBER = re.compile(r"-\d[\d.]*")


@dataclass(slots=True)
class Command:
    """One command: `image` of its container if it has one, variables, mounts, and the words of the program.

    `options` has the other options of the container, and `others` the commands that a shell runs beside it.
    """

    words: list[str]
    image: str = ""
    variables: dict[str, str] = field(default_factory=dict)
    mounts: dict[str, str] = field(default_factory=dict)
    ports: list[str] = field(default_factory=list)
    options: list[str] = field(default_factory=list)
    others: list[list[str]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Flag:
    """One option with its values; `name` without hyphens in front, the others as underscores."""

    written: str
    name: str
    values: tuple[str, ...]

    @property
    def origin(self) -> str:
        """Return the option as it was written, without a value that is secret by its name."""
        shown = ("***",) if self.values and is_secret(self.name) else self.values
        return " ".join((self.written, *shown)).strip()


def split_commands(text: str) -> list[list[str]]:
    """Return the words of each simple command of a text. Raises ConfigurationError if it is too long or not closed."""
    if len(text) > LONGEST:
        raise ConfigurationError(f"the command is longer than {LONGEST} characters")
    lines = [line for line in text.replace("\\\r\n", " ").replace("\\\n", " ").splitlines() if line.lstrip()[:1] != "#"]
    lexer = shlex.shlex(" ; ".join(lines), posix=True, punctuation_chars=True)
    lexer.whitespace_split, lexer.commenters = True, ""
    try:
        words = list(lexer)
    except ValueError as error:
        raise ConfigurationError(f"the command cannot be taken apart: {error}; quote it as the shell does") from error
    commands: list[list[str]] = [[]]
    for word in check_count(words):
        if _OPERATOR.fullmatch(word):
            commands.append([])
        else:
            commands[-1].append(word)
    return [command for command in commands if command]


def check_count(words: list[str]) -> list[str]:
    """Return the words. Raises ConfigurationError if they are too many."""
    if len(words) > MAX_WORDS:
        raise ConfigurationError(f"the command has more than {MAX_WORDS} words")
    return words


def read_command(words: Sequence[str], is_server: Callable[[str], bool]) -> Command:
    """Return a command without what stands before the program: variables, sudo, a shell, docker run with options.

    Of several commands in a shell it is the first whose program `is_server`, or the first.
    """
    command = Command(list(words))
    for _ in range(8):  # a shell in a container in a shell, and no further
        _strip(command)
        first = command.words[0] if command.words else ""
        if _SHELLS.fullmatch(first) and len(command.words) > 2 and "c" in command.words[1]:
            _read_shell(command, is_server)
        elif _CONTAINERS.fullmatch(first) and "run" in command.words[1:2]:
            _read_container(command)
        else:
            break
    return command


def _read_shell(command: Command, is_server: Callable[[str], bool]) -> None:
    commands = [Command(words, variables=command.variables) for words in split_commands(command.words[2])]
    for each in commands:
        _strip(each)
    chosen = next((each for each in commands if is_server(module_of(each.words)[0])), next(iter(commands), None))
    command.others += [each.words for each in commands if each is not chosen and each.words]
    command.words = [] if chosen is None else chosen.words


def _strip(command: Command) -> None:
    """Take variables and words such as sudo from the beginning."""
    words = command.words
    while words and (words[0] in _PREFIXES or _ASSIGNMENT.fullmatch(words[0])):
        found = _ASSIGNMENT.fullmatch(words.pop(0))
        if found:
            command.variables[found[1]] = found[2]


def _read_container(command: Command) -> None:
    rest = command.words[2:]
    entry: list[str] = []
    while rest and rest[0].startswith("-"):
        name, equals, value = rest.pop(0).partition("=")
        if name in _BARE_CONTAINER_FLAGS:
            continue
        if not equals:
            value = rest.pop(0) if rest else ""
        if name in ("-e", "--env"):
            variable, _, content = value.partition("=")
            command.variables[variable] = content
        elif name in ("-v", "--volume"):
            command.mounts |= mount(value)
        elif name in ("-p", "--publish"):
            command.ports.append(value)
        elif name == "--entrypoint":
            entry = value.split()
        else:
            command.options.append(name)
    command.image = rest.pop(0) if rest else ""
    command.words = [*entry, *rest]


def mount(text: str) -> dict[str, str]:
    """Return the host's directory of a directory of the container; nothing for a named volume."""
    outside, _, inside = text.partition(":")
    return {inside.partition(":")[0]: outside.rstrip("/")} if outside.startswith(("/", "./", "~")) and inside else {}


def module_of(words: Sequence[str]) -> tuple[str, list[str]]:
    """Return the program or Python module that a command runs, and its arguments."""
    if not words:
        return "", []
    if _PYTHON.fullmatch(words[0]):
        rest = [word for word in words[1:] if word != "-u"]
        return (rest[1], rest[2:]) if rest[:1] == ["-m"] and len(rest) > 1 else (" ".join(rest[:1]), rest[1:])
    return words[0].rpartition("/")[2], list(words[1:])


def read_flags(
    words: Sequence[str], switches: Collection[str], lists: Collection[str], short: Mapping[str, str]
) -> Iterator[Flag]:
    """Yield the options of a command, and what is no option's value as one with an empty name.

    `switches` take no value, `lists` take several; any other takes one.
    """
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-") or word == "-":
            yield Flag("", "", (word,))
            continue
        written, equals, value = word.partition("=")
        name = short.get(written, written.lstrip("-").replace("-", "_"))
        values = [value] if equals else []
        if not equals and name.partition(".")[0] not in switches and not name.startswith("no_"):
            most = 1000 if name in lists else 1
            while rest and len(values) < most and (not rest[0].startswith("-") or _NUMBER.fullmatch(rest[0])):
                values.append(rest.pop(0))
        yield Flag(written, name, tuple(values))
