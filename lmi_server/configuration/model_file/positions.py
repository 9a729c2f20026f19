"""Reads YAML as plain data that knows the line of each key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmi_server.contract.errors import ConfigurationError
from lmi_server.contract.texts.quoting import one_line

if TYPE_CHECKING:
    from yaml.nodes import Node

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
        return one_line(".".join(self.renamed.get(path[: end + 1], str(path[end])) for end in range(len(path))))

    def label(self, path: KeyPath) -> str:
        """Return file, line and key, with which every message begins."""
        return f"{self.place(path)}: {self.name(path)}"

    def place(self, path: KeyPath) -> str:
        return f"{self.file}:{self.line(path)}"


def read_document(path: Path, text: str | None = None) -> YamlDocument:
    """Read a file in YAML, or `text` in its place.

    Raises ConfigurationError if it cannot be read, if a key is given twice, or if it is too large.
    """
    file = str(path.resolve())
    documents = parse_documents(_read(path, file) if text is None else text, file)
    if len(documents) > 1:
        line = documents[1].first
        raise ConfigurationError(
            f"{file}:{line}: is not valid YAML: a second document begins; put it into another file"
        )
    return documents[0] if documents else YamlDocument(file, None, {})


def parse_documents(text: str, file: str) -> list[YamlDocument]:
    """Return every document of a text in YAML. Raises ConfigurationError as `read_document` does."""
    if len(text) > LONGEST:
        raise ConfigurationError(f"{file}: is larger than {LONGEST} characters; divide it")
    yaml = _library()
    try:
        nodes = list(yaml.compose_all(text, Loader=yaml.SafeLoader))
        return [_Reader(file).document(node) for node in nodes]
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = file if mark is None else f"{file}:{mark.line + 1}"
        raise ConfigurationError(f"{place}: is not valid YAML: {error.problem or error}") from error
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{file}: is not valid YAML: {error}") from error
    except RecursionError:
        raise ConfigurationError(f"{file}: is nested too deeply") from None


def _read(path: Path, file: str) -> str:
    try:
        with path.open("rb") as opened:
            return opened.read(4 * LONGEST).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{file}: cannot be read: {error}") from error


def _library() -> Any:
    # Imported late: only who names a YAML file needs it.
    try:
        import yaml
    except ImportError as error:
        raise ConfigurationError("reading YAML needs the package PyYAML; run: pip install PyYAML") from error
    return yaml


class _Reader:
    """Makes plain data of one document, and notes lines. Aliases repeat what they name, so the values are counted."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._lines: dict[KeyPath, int] = {}
        self._count = 0
        self._loader = _library().SafeLoader("")

    def document(self, node: Node) -> YamlDocument:
        data = self._value(node, ())
        return YamlDocument(self._file, data, self._lines, first=node.start_mark.line + 1)

    def _value(self, node: Node, path: KeyPath) -> Any:
        # Recursive aliases would never end; YAML allows them, and no model file has one.
        if len(path) > _DEEPEST:
            raise self._error(node, "is nested too deeply")
        match node.id:
            case "mapping":
                return {key: self._value(child, (*path, key)) for key, child in self._items(node, path, self._lines)}
            case "sequence":
                return [self._item(item, (*path, index)) for index, item in enumerate(node.value)]
        return self._scalar(node)

    def _item(self, item: Node, path: KeyPath) -> Any:
        self._count_one(item)
        self._lines[path] = item.start_mark.line + 1
        return self._value(item, path)

    def _scalar(self, node: Node) -> Any:
        if node.tag != _TEXT and len(node.value) > _LONGEST_NUMBER:
            raise self._error(node, "is too long for a number")
        try:
            return self._loader.construct_object(node)
        except ValueError as error:
            raise self._error(node, f"is not valid YAML: {error}") from error

    def _items(self, node: Node, path: KeyPath, lines: dict[KeyPath, int]) -> Iterator[tuple[str, Node]]:
        """Yield keys and values of a mapping, what `<<` merges into it last. Raises if a key is given twice."""
        seen: set[str] = set()
        merged: list[Node] = []
        for key, child in node.value:
            self._count_one(key)
            if key.id != "scalar":
                raise self._error(key, "a key must be a text")
            if key.tag == _MERGE:
                merged += child.value if child.id == "sequence" else [child]
                continue
            if key.value in seen:
                raise self._error(key, f"{key.value} is given twice; remove one")
            seen.add(key.value)
            lines[(*path, key.value)] = key.start_mark.line + 1
            yield key.value, child
        for source in merged:
            self._count_one(source)
            if source.id != "mapping":
                raise self._error(source, "<< takes a mapping, or a list of mappings")
            for name, child in self._items(source, path, {}):
                if name not in seen:
                    seen.add(name)
                    lines[(*path, name)] = child.start_mark.line + 1
                    yield name, child

    def _count_one(self, node: Node) -> None:
        self._count += 1
        if self._count > MAX_VALUES:
            raise self._error(node, f"has more than {MAX_VALUES} values, counting what aliases repeat")

    def _error(self, node: Node, text: str) -> ConfigurationError:
        return ConfigurationError(f"{self._file}:{node.start_mark.line + 1}: {text}")


LONGEST = 1048576
"""Characters that a file in YAML may have."""
MAX_VALUES = 100_000
"""Values that a document may have, counting what its aliases repeat."""
_MERGE, _TEXT = "tag:yaml.org,2002:merge", "tag:yaml.org,2002:str"
_LONGEST_NUMBER = 1000  # characters; the time that a number takes grows faster than its length
_DEEPEST = 50
