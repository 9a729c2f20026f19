"""A request, or a batch of requests, as user code gets it."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from djl_python.np_util import from_nd_list, from_npz
from djl_python.optional_packages import needs
from djl_python.pair_list import PairList
from djl_python.properties import LateProperties, Properties
from lmi_server.media.budget import MediaBudget
from lmi_server.media.images import open_image

if TYPE_CHECKING:
    from djl_python.np_util import Array

_IN_BATCH = re.compile(r"batch_(\d+)[._](.*)", re.DOTALL)


class Input(LateProperties):
    """`properties` are the headers of the request; `content` has its query parameters, then its body under "data"."""

    content: PairList
    function_name: str | None

    def __init__(self) -> None:
        self.function_name = None
        self.properties = {}
        self.content = PairList()

    # --- properties ---

    def get_function_name(self) -> str | None:
        return self.function_name

    def get_properties(self) -> dict[str, Any]:
        """Return the properties themselves; the caller may change them."""
        return self.properties

    def get_property(self, key: str) -> Any:
        """Return a property, whatever the case of its name; None if it is missing."""
        properties = self.properties
        return (properties if isinstance(properties, Properties) else Properties(properties)).get(key)

    # --- batches ---

    def is_batch(self) -> bool:
        return "batch_size" in self.properties

    def get_batch_size(self) -> int:
        return int(self.properties.get("batch_size", "1"))

    def get_batches(self) -> list[Input]:
        """Return each request of the batch as an Input; this Input alone if it is not a batch."""
        if not self.is_batch():
            return [self]
        batches = [make_input({}, [], None) for _ in range(self.get_batch_size())]
        for key, value in self.properties.items():
            found = _IN_BATCH.fullmatch(key)
            if found is not None and key != "batch_size":
                # Past Properties.__setitem__, which looks for other spellings: keys of one request differ anyway.
                dict.__setitem__(batches[int(found[1])].properties, found[2], value)
        for name, content in zip(self.content.keys, self.content.values, strict=True):
            found = None if name is None else _IN_BATCH.fullmatch(name)
            if found is not None:
                batches[int(found[1])].content.add(found[2], content)
        return batches

    # --- content ---

    def get_content(self) -> PairList:
        return self.content

    def is_empty(self) -> bool:
        """Return whether this is the first call of a worker, which asks the handler to load the model."""
        return self.content.is_empty()

    def contains_key(self, key: str) -> bool:
        return self.content.get(key) is not None

    def get_data(self, key: str | None = None) -> Any:
        """Return the content decoded by its content type: arrays, the value of JSON, a text, an image, or bytes."""
        content_type = self.get_property("content-type")
        if content_type == "tensor/ndlist":
            return self.get_as_numpy(key)
        if content_type == "tensor/npz":
            return self.get_as_npz(key)
        if content_type and content_type.startswith("application/json"):
            return self.get_as_json(key)
        if content_type and content_type.startswith("text/"):
            return self.get_as_string(key)
        if content_type and content_type.startswith("image/"):
            return self.get_as_image(key)
        return None if self.content.is_empty() else self.get_as_bytes(key)

    def get_as_bytes(self, key: str | None = None) -> Any:
        """Return the bytes under `key` as a bytearray; without `key` those under "data", or else the first.

        Returns None if there is no content at all. Raises KeyError if `key` is missing.
        """
        content = self.content
        if not content.keys:
            return None
        if key is None:
            key = "data" if "data" in content.keys else content.keys[0]
        elif key not in content.keys:
            raise KeyError(key)
        return content.values[content.keys.index(key)]

    def get_as_string(self, key: str | None = None) -> Any:
        """Return a text. Raises AttributeError, as LMI's does, if there is no content at all."""
        return _present(self.get_as_bytes(key)).decode("utf-8")

    def get_as_json(self, key: str | None = None) -> Any:
        """Return the value of JSON. Raises AttributeError, as LMI's does, if there is no content at all."""
        return json.loads(_present(self.get_as_bytes(key)))

    def get_as_image(self, key: str | None = None) -> Any:
        """Return a PIL image. Raises ImportError if Pillow is not installed.

        Raises PayloadTooLargeError if the images of the request would take more than option.max_media_size.
        """
        self._media = self.__dict__.get("_media") or MediaBudget()
        with needs("Pillow", "images"):
            return open_image(self.get_as_bytes(key), self._media)

    def get_as_numpy(self, key: str | None = None) -> list[Array]:
        """Return the arrays of an NDList (or of an NPZ file)."""
        return from_nd_list(self.get_as_bytes(key))

    def get_as_npz(self, key: str | None = None) -> list[Array]:
        return from_npz(self.get_as_bytes(key))

    def get_as_csv(self, key: str | None = None) -> list[dict[str, Any]]:
        """Return the rows of a CSV file as dicts with the names in its first line."""
        return list(csv.DictReader(io.StringIO(self.get_as_string(key))))

    def read(self, conn: Any) -> None:
        """Read a request from the socket of LMI's front end, for code that stands in for its worker."""
        for _ in range(retrieve_short(conn)):
            key, value = retrieve_utf8(conn), retrieve_utf8(conn)
            self.properties[str(key)] = value
        for _ in range(retrieve_short(conn)):
            name, length = retrieve_utf8(conn), retrieve_int(conn)
            self.content.add(name, retrieve_buffer(conn, length))
        self.function_name = self.properties.get("handler")

    def __str__(self) -> str:
        pairs = zip(self.content.keys, self.content.values, strict=True)
        lines = [f"properties: {dict(self.properties)}"]
        lines += [f"{key}: {self.get_data(key) if key is not None else value!r}" for key, value in pairs]
        return "\n".join(lines)


def _present(data: Any) -> Any:
    if data is None:
        raise AttributeError("the input has no content to decode; look at is_empty() first")
    return data


def make_input(properties: Mapping[str, Any], content: list[tuple[str, bytes]], function_name: str | None) -> Input:
    """Return an Input with a copy of `properties`. Not part of LMI's interface."""
    return make_input_late(lambda: Properties(properties), content, function_name)


def make_input_late(
    properties: Callable[[], Properties], content: list[tuple[str, bytes]], function_name: str | None
) -> Input:
    """Return an Input whose properties `properties` makes when they are read. Not part of LMI's interface."""
    made = Input.__new__(Input)
    made.function_name = function_name
    made.content = PairList([key for key, _ in content], [bytearray(value) for _, value in content])
    made.__dict__["_properties"] = properties
    return made


# --- what LMI's front end sends over a socket: big-endian numbers, and texts after their length ---


def retrieve_buffer(conn: Any, length: int) -> bytearray:
    """Read `length` bytes from a socket. Raises ValueError if it is closed before."""
    data = bytearray()
    while len(data) < length:
        part = conn.recv(length - len(data))
        if not part:
            raise ValueError(f"the connection was closed after {len(data)} of {length} bytes")
        data += part
    return data


def retrieve_int(conn: Any) -> int:
    return int.from_bytes(retrieve_buffer(conn, 4), "big", signed=True)


def retrieve_short(conn: Any) -> int:
    return int.from_bytes(retrieve_buffer(conn, 2), "big", signed=True)


def retrieve_utf8(conn: Any) -> str | None:
    """Read a text; None if its length is below 0."""
    length = retrieve_int(conn)
    return None if length < 0 else retrieve_buffer(conn, length).decode()
