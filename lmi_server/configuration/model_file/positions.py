"""Reads YAML as plain data that knows the line of each key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmi_server.contract.errors import ConfigurationError

if TYPE_CHECKING:
    from yaml.nodes import MappingNode, Node

KeyPath = tuple[str | int, ...]
"""Keys and indexes from the top of a file to a value."""


@dataclass(frozen=True, slots=True)
class YamlDocument:
    """The content of a file, or of a part of it, which begins in the line `first`.

    `lines` has the line of each key, and of each item of a list.
    `renamed` has the keys as the file spells them, where `data` has them by their present names.
    """

    file: str
    data: Any
    lines: Mapping[KeyPath, int]
    renamed: Mapping[KeyPath, str] = field(default_factory=dict)
    first: int = 1

    def within(self, path: KeyPath) -> YamlDocument:
        """Return the part of the document at `path`."""
        data, depth = self.data, len(path)
        for key in path:
            data = data[key]
        lines = {key[depth:]: line for key, line in self.lines.items() if len(key) > depth and key[:depth] == path}
        return YamlDocument(self.file, data, lines, first=self.line(path))

    def line(self, path: KeyPath) -> int:
        """Return the line of the value at `path`, or of the nearest that stands in the file."""
        return next((self.lines[path[:end]] for end in range(len(path), 0, -1) if path[:end] in self.lines), self.first)

    def name(self, path: KeyPath) -> str:
        """Return the path as the file spells it: engine_config.engine_kwargs.max_num_seqs."""
        return ".".join(self.renamed.get(path[: end + 1], str(path[end])) for end in range(len(path)))

    def label(self, path: KeyPath) -> str:
        """Return file, line and key, with which every message begins."""
        return f"{self.place(path)}: {self.name(path)}"

    def place(self, path: KeyPath) -> str:
        return f"{self.file}:{self.line(path)}"


def read_document(path: Path) -> YamlDocument:
    """Read a file in YAML. Raises ConfigurationError if it cannot be read, or if a key is given twice."""
    file = str(path.resolve())
    lines: dict[KeyPath, int] = {}
    try:
        node = _compose(path.read_text(encoding="utf-8"), file)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{file}: cannot be read: {error}") from error
    data = None if node is None else _value(node, (), lines, file)
    return YamlDocument(file, data, lines)


def _compose(text: str, file: str) -> Node | None:
    yaml = _library()
    try:
        node: Node | None = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = file if mark is None else f"{file}:{mark.line + 1}"
        raise ConfigurationError(f"{place}: is not valid YAML: {error.problem or error}") from error
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{file}: is not valid YAML: {error}") from error
    return node


def _library() -> Any:
    # Imported late: only who names a YAML file needs it.
    try:
        import yaml
    except ImportError as error:
        raise ConfigurationError("reading YAML needs the package PyYAML; run: pip install PyYAML") from error
    return yaml


def _value(node: Node, path: KeyPath, lines: dict[KeyPath, int], file: str) -> Any:
    # Recursive aliases would never end; YAML allows them, and no model file has one.
    if len(path) > _DEEPEST:
        raise ConfigurationError(f"{file}:{node.start_mark.line + 1}: is nested too deeply")
    match node.id:
        case "mapping":
            return {key: _value(child, (*path, key), lines, file) for key, child in _items(node, path, lines, file)}
        case "sequence":
            items = list(enumerate(node.value))
            lines.update({(*path, index): item.start_mark.line + 1 for index, item in items})
            return [_value(item, (*path, index), lines, file) for index, item in items]
    return _library().SafeLoader("").construct_object(node)


def _items(node: MappingNode, path: KeyPath, lines: dict[KeyPath, int], file: str) -> Iterator[tuple[str, Node]]:
    """Yield keys and values of a mapping, what `<<` merges into it last. Raises ConfigurationError for a key twice."""
    seen: set[str] = set()
    merged: list[Node] = []
    for key, child in node.value:
        line = key.start_mark.line + 1
        if key.id != "scalar":
            raise ConfigurationError(f"{file}:{line}: a key must be a text")
        if key.tag == _MERGE:
            merged += child.value if child.id == "sequence" else [child]
            continue
        if key.value in seen:
            raise ConfigurationError(f"{file}:{line}: {key.value} is given twice; remove one")
        seen.add(key.value)
        lines[(*path, key.value)] = line
        yield key.value, child
    for source in merged:
        for name, child in _items(source, path, {}, file):
            if name not in seen:
                seen.add(name)
                lines[(*path, name)] = child.start_mark.line + 1
                yield name, child


_MERGE = "tag:yaml.org,2002:merge"
_DEEPEST = 50
