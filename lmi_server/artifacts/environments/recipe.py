"""What a model asks for: packages by name and version. Its file of requirements is an input like any other.

A line may name a package of the index, with extras, versions, a marker and hashes. Whatever else pip reads is refused:
URLs and paths would bring files from anywhere, and options (`--index-url`, `-r`) another index, or the text of
another file of this machine into an error.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lmi_server.contract.errors import ConfigurationError
from lmi_server.contract.texts.quoting import excerpt

_MAX_BYTES = 65536
_NAME = r"[A-Za-z0-9](?:[\w.-]{0,126}[A-Za-z0-9])?"
_VERSION = r"(?:===?|~=|!=|<=?|>=?)\s*[\w.!+*-]{1,80}"
_REQUIREMENT = re.compile(
    rf"(?P<name>{_NAME})\s*(?:\[\s*{_NAME}(?:\s*,\s*{_NAME})*\s*\])?\s*(?:{_VERSION}(?:\s*,\s*{_VERSION})*)?\s*"
    r"(?:;[\w\s.'\"<>=!~()+-]{1,200})?",
    re.ASCII,
)
# uv takes such a name for the path of a file.
_ARCHIVE = re.compile(r"\.(?:whl|zip|tgz|tbz|txz|tlz|tar(?:\.\w+)?)\Z", re.ASCII | re.IGNORECASE)
_COMMENT = re.compile(r"(?:^|\s)#.*$")
_HASH = re.compile(r"\s--hash=sha256:[0-9a-f]{64}(?=\s|$)")
_ALLOWED = (
    "a package by its name, with versions (vllm==0.32.0) and --hash=sha256:DIGEST; put the wheel of any other package "
    "into wheelhouse/ beside the file"
)


@dataclass(frozen=True, slots=True)
class Recipe:
    """An environment as a model asks for it, the same for every model that asks for the same.

    `requirements` are lines that uv takes. `overrides` take the place of what packages demand. uv asks no index but
    `wheelhouse`, if there is one. `asked_by` names the keys, for messages.
    """

    requirements: tuple[str, ...]
    asked_by: str
    overrides: tuple[str, ...] = ()
    wheelhouse: Path | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Return the packages that are named, normalised as an index does it."""
        found = (_REQUIREMENT.match(line) for line in self.requirements)
        return tuple(dict.fromkeys(normalize_name(match["name"]) for match in found if match is not None))


def normalize_name(name: str) -> str:
    """Return a package's name as an index has it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def requirement_lines(model_dir: Path, name: str, key: str) -> tuple[str, ...]:
    """Return the requirements of the file `name` of a model, which `key` names, without comments.

    Raises ConfigurationError if it is not a file of the model, or has a line that is not taken.
    """
    path = model_dir / name
    place = f"{key} = {excerpt(name)}"
    if not os.path.isfile(path):  # opening a pipe would wait for its writer
        raise ConfigurationError(f"{place} is no file; name a file in {model_dir}")
    # A link may lead to any file of this machine, and messages quote what cannot be read.
    if os.path.isabs(name) or not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(model_dir)):
        raise ConfigurationError(f"{place} leads out of the directory of the model; name a file in it")
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ConfigurationError(f"{place} cannot be read ({error}); name a file in {model_dir}") from error
    if len(content) > _MAX_BYTES:
        raise ConfigurationError(f"{place} has more than {_MAX_BYTES} bytes; it takes one line for each package")
    lines = tuple(_checked_lines(content.decode("utf-8-sig", "replace"), place))
    if not lines:
        raise ConfigurationError(f"{place} names no package; write one in each line, or remove the key")
    return lines


def _checked_lines(text: str, place: str) -> Iterator[str]:
    # Comments first: one that ends with \ must not take the next line with it.
    text = "\n".join(_COMMENT.sub("", written) for written in text.splitlines())
    # A line that ends with \ goes on in the next one, as lists of hashes do.
    for number, written in enumerate(text.replace("\\\n", " ").splitlines(), 1):
        # One space at a time: the expression below takes more time the longer a run of them is.
        line = " ".join(written.split())
        if not line:
            continue
        hashes = _HASH.findall(line)
        requirement = _HASH.sub("", line).strip()
        found = _REQUIREMENT.fullmatch(requirement)
        if found is None or _ARCHIVE.search(found["name"]) is not None:
            raise ConfigurationError(f'{place}: requirement {number} is "{excerpt(line)}"; allowed: {_ALLOWED}')
        yield "".join((requirement, *hashes))
