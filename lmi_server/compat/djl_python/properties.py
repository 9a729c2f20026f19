"""Properties of a request. Most are HTTP headers, whose names are case-insensitive."""

from __future__ import annotations

from typing import Any


class Properties(dict[str, Any]):
    """A dict that keeps the spelling of its keys and finds them whatever their case."""

    # By key in lower case. Most lookups use the exact key, so it is built on the first miss. It is a default of the
    # class, because pickle and copy fill a dict before they set its attributes.
    _spelling: dict[str, str] | None = None

    def __getstate__(self) -> None:
        return None

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(self._spelled(key), value)
        self._spelling = None

    def __delitem__(self, key: str) -> None:
        super().__delitem__(self._spelled(key))
        self._spelling = None

    def __missing__(self, key: str) -> Any:  # dict calls it for a key that is not there in exactly this spelling
        spelled = self._spelled(key)
        if spelled in self.keys():
            return super().__getitem__(spelled)
        raise KeyError(key)

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or (isinstance(key, str) and super().__contains__(self._spelled(key)))

    def get(self, key: str, default: Any = None) -> Any:
        try:
            return self[key]
        except KeyError:
            return default

    def pop(self, key: str, *default: Any) -> Any:
        spelled = self._spelled(key)
        self._spelling = None
        return super().pop(spelled, *default)

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *values: Any, **more: Any) -> None:
        for key, value in dict(*values, **more).items():
            self[key] = value

    def copy(self) -> Properties:
        return Properties(self)

    def _spelled(self, key: str) -> str:
        if super().__contains__(key):
            return key
        if self._spelling is None:
            self._spelling = {name.lower(): name for name in self}
        return self._spelling.get(key.lower(), key)


class LateProperties:
    """Base of a request, whose properties are made at their first use: many handlers read the body only."""

    properties: dict[str, Any]

    def __getattr__(self, name: str) -> Any:
        made = self.__dict__.pop("_properties", None) if name == "properties" else None
        if made is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        self.properties = made()
        return self.properties

    def __getstate__(self) -> dict[str, Any]:
        """Return what pickle and copy keep: every public attribute."""
        public = {name: value for name, value in self.__dict__.items() if not name.startswith("_")}
        return {"properties": self.properties, **public}
