"""The answer that user code returns."""

from __future__ import annotations

import base64
import datetime
import json
import logging
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from djl_python.np_util import to_nd_list, to_npz
from djl_python.pair_list import PairList

if TYPE_CHECKING:
    from djl_python.np_util import Array

logger = logging.getLogger(__name__)

ERROR_MESSAGE = "invoke handler failure"
_STREAMED = -1  # as number of contents: pieces follow


def _outputs_line(item: Any) -> bytes:
    return json.dumps({"outputs": item}, default=_plain).encode() + b"\n"


def _json(value: Any) -> bytes:
    # The separators and the indentation are LMI's, so that bodies are equal byte by byte.
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, indent=2, separators=(",", ":"), default=_plain)
    return text.encode("utf-8")


def _plain(value: Any) -> Any:
    """Return plain values for dates, times, bytes (as base64), and numbers, arrays and tensors of numpy and torch."""
    if isinstance(value, datetime.date | datetime.time):
        return str(value)
    if isinstance(value, bytes | bytearray):
        return base64.b64encode(value).decode()
    if hasattr(value, "tolist") and not isinstance(value, memoryview):  # arrays, tensors and their scalars
        return value.tolist()
    raise TypeError(f"{type(value).__name__} cannot be written as JSON: {value!r}")


class Output:
    """`code` is the status of the HTTP answer, `properties` are its headers, `content` its body.

    Methods that change an Output return the Output itself: calls can be chained.
    """

    def __init__(self, code: int = 200, message: str = "OK") -> None:
        self.code = code
        self.message = message
        self.properties: dict[str, Any] = {}
        self.content = PairList()
        self.stream_content: Iterator[Any] | None = None
        self.stream_output_formatter: Callable[[Any], Any] | None = None
        self.finalize_function: Callable[..., Any] | None = None
        self.finalize_args: tuple[Any, ...] = ()

    def set_code(self, code: int) -> Output:
        self.code = code
        return self

    def set_message(self, message: str) -> Output:
        self.message = message
        return self

    def error(
        self, error: str, code: int = 424, message: str = ERROR_MESSAGE, batch_index: int | None = None
    ) -> Output:
        """Replace the answer by an error; with `batch_index`, only the answer to that request of the batch."""
        body = {"code": code, "message": message, "error": error}
        if batch_index is None:
            self.code, self.message = code, message
            self.content, self.stream_content = PairList(), None
            self.add_property("content-type", "application/json")
            return self.add_as_json(body)
        self.add_property(f"batch_{batch_index}_code", str(code))
        self.add_property(f"batch_{batch_index}_Content-Type", "application/json")
        return self.add_as_json(body, batch_index=batch_index)

    # --- headers ---

    def add_property(self, key: str, val: Any) -> Output:
        """Set a header. In the answer to a batch, `batch_<index>_<name>` is the header of one request."""
        self.properties[key] = val
        return self

    def get_properties(self) -> dict[str, Any]:
        return self.properties

    def get_property(self, key: str) -> Any:
        return self.properties.get(key)

    # --- body ---

    def add(self, value: Any, key: str | None = None, batch_index: int | None = None) -> Output:
        """Add a text, bytes, or anything that JSON can express; in a batch, for the request `batch_index`."""
        if isinstance(value, str):
            value = value.encode("utf-8")
        elif not isinstance(value, bytes | bytearray):
            value = _json(value)
        if key is not None and not isinstance(key, str):
            logger.warning("the key %r of a content is not a text; it is converted", key)
            key = str(key)
        self.content.add(key if batch_index is None else f"batch_{batch_index}.{key or ''}", value)
        return self

    def add_as_numpy(
        self, np_list: Sequence[Array] | Array, key: str | None = None, batch_index: int | None = None
    ) -> Output:
        """Add arrays as an NDList."""
        return self.add(to_nd_list(np_list), key, batch_index)

    def add_as_npz(self, np_list: Sequence[Array], key: str | None = None, batch_index: int | None = None) -> Output:
        return self.add(to_npz(np_list), key, batch_index)

    def add_as_json(self, val: Any, key: str | None = None, batch_index: int | None = None) -> Output:
        """Add `val` as JSON. Raises ValueError if a number is NaN or infinite, TypeError for other types."""
        return self.add(_json(val), key, batch_index)

    def add_stream_content(
        self, stream_content: Iterator[Any], output_formatter: Callable[[Any], Any] | None = _outputs_line
    ) -> Output:
        """Stream the items of an iterator, each as soon as it yields it.

        `output_formatter` turns an item into a text, bytes or plain values. By default an item X is sent as
        `{"outputs": X}` and a line feed; None sends items as they are.
        """
        self.stream_content = stream_content
        self.stream_output_formatter = output_formatter
        return self

    def send(self, cl_socket: Any) -> None:
        """Write the answer to the socket of LMI's front end, for code that stands in for its worker."""
        head = bytearray(struct.pack(">h", self.code))
        self.write_utf8(head, self.message)
        head += struct.pack(">h", len(self.properties))
        for key, value in self.properties.items():
            self.write_utf8(head, key)
            self.write_utf8(head, str(value))
        if self.stream_content is not None:
            cl_socket.sendall(head + struct.pack(">h", _STREAMED))
            _send_stream(self, cl_socket)
            return
        head += struct.pack(">h", len(self.content.keys))
        for name, data in zip(self.content.keys, self.content.values, strict=True):
            self.write_utf8(head, name)
            head += struct.pack(">i", len(data)) + data
        cl_socket.sendall(head)

    @staticmethod
    def write_utf8(msg: bytearray, val: str | None) -> None:
        """Append a text after its length; -1 stands for None."""
        data = b"" if val is None else val.encode()
        msg += struct.pack(">i", -1 if val is None else len(data)) + data

    # --- afterwards ---

    def finalize(self, finalize_function: Callable[..., Any], *args: Any) -> Output:
        """Have `finalize_function(*args)` called after the answer was sent, whether it ended well or not."""
        self.finalize_function = finalize_function
        self.finalize_args = args
        return self

    def execute_finalize(self) -> Any:
        if self.finalize_function is not None:
            return self.finalize_function(*self.finalize_args)
        return None

    @staticmethod
    def _encode_json(val: Any) -> bytearray:
        return bytearray(_json(val))

    @staticmethod
    def binary_encode(data: Mapping[str, Any]) -> bytearray:
        """Return the result of one step of a rolling batch for one request as bytes.

        The format is big-endian: int16 count, then per entry int32 length and key, int32 length and value.
        """
        encoded = bytearray(struct.pack(">h", len(data)))
        for key, value in data.items():
            for text in (key.encode(), str(value).encode()):
                encoded += struct.pack(">i", len(text)) + text
        return encoded

    @staticmethod
    def binary_decode(encoded: bytes | bytearray) -> dict[str, str]:
        """Return what `binary_encode` encoded. Raises ValueError for other bytes."""
        texts, at = [], 2
        try:
            for _ in range(2 * struct.unpack_from(">h", encoded)[0]):
                (length,) = struct.unpack_from(">i", encoded, at)
                texts.append(encoded[at + 4 : at + 4 + length].decode())
                at += 4 + length
        except (struct.error, UnicodeDecodeError) as error:
            raise ValueError(f"the bytes are no step of a rolling batch: {error}") from error
        if at != len(encoded):
            raise ValueError("the bytes are no step of a rolling batch: there are bytes after its end")
        return dict(zip(texts[::2], texts[1::2], strict=True))

    def __str__(self) -> str:
        types = {
            str(key): f"type: {type(value)}" for key, value in zip(self.content.keys, self.content.values, strict=True)
        }
        shown = {"code": self.code, "message": self.message, "properties": self.properties, "content": types}
        return json.dumps(shown, indent=2, default=str)


def stream_pieces(output: Output) -> Iterator[bytes]:
    """Yield the bytes of the stream content. Not part of LMI's interface."""
    assert output.stream_content is not None
    form = output.stream_output_formatter
    for item in output.stream_content:
        sent = item if form is None else form(item)
        if isinstance(sent, str):
            yield sent.encode("utf-8")
        elif isinstance(sent, bytes | bytearray):
            yield bytes(sent)
        else:
            yield _json(sent)


def _send_stream(output: Output, cl_socket: Any) -> None:
    last = b""
    try:
        for piece in stream_pieces(output):
            cl_socket.sendall(struct.pack(">?i", True, len(piece)) + piece)
    except OSError:
        raise
    except Exception as error:  # the border to the user's code; LMI's last piece has the message
        logger.exception("the stream raised")
        last = str(error).encode()
    cl_socket.sendall(struct.pack(">?i", False, len(last)) + last)
