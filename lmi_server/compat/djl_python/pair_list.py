"""An ordered list of (key, value) pairs, in which a key may repeat or be None."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


class PairList:
    """The content of a request or an answer: `keys` and `values` are parallel."""

    def __init__(
        self,
        keys: list[str | None] | None = None,
        values: list[Any] | None = None,
        pair_list: Iterable[tuple[str | None, Any]] | None = None,
        pair_map: Mapping[str | None, Any] | None = None,
    ) -> None:
        """Take `keys` and `values` as they are, or copy pairs. Raises ValueError if there are more keys than values."""
        self.keys: list[str | None] = [] if keys is None else keys
        self.values: list[Any] = [] if values is None else values
        if len(self.keys) != len(self.values):
            raise ValueError(f"there are {len(self.keys)} keys and {len(self.values)} values; give one for each")
        for key, value in pair_list or (pair_map.items() if pair_map else ()):
            self.keys.append(key)
            self.values.append(value)

    def add(
        self,
        key: str | None = None,
        value: Any = None,
        index: int | None = None,
        pair: tuple[str | None, Any] | None = None,
    ) -> None:
        """Add a pair at position `index`, by default at the end. A pair whose value is None is ignored."""
        if pair is not None:
            key, value = pair
        if value is None:
            return
        position = len(self.keys) if index is None else index
        self.keys.insert(position, key)
        self.values.insert(position, value)

    def add_all(self, other: PairList) -> None:
        self.keys.extend(other.keys)
        self.values.extend(other.values)

    def size(self) -> int:
        return len(self.keys)

    def __len__(self) -> int:
        return len(self.keys)

    def is_empty(self) -> bool:
        return not self.keys

    def get(self, key: str | None) -> Any:
        """Return the value of the first pair with `key`; None if there is none."""
        return self.values[self.keys.index(key)] if key in self.keys else None

    def contains_key(self, key: str | None) -> bool:
        return key in self.keys

    def key_at(self, index: int) -> str | None:
        return self.keys[index]

    def value_at(self, index: int) -> Any:
        return self.values[index]

    def get_keys(self) -> list[str | None]:
        return self.keys

    def get_values(self) -> list[Any]:
        return self.values
