"""Reads the header of a model in GGUF: its architecture, sizes and tensors, without its weights.

The format is that of ggml's docs/gguf.md, versions 2 and 3.
"""

from __future__ import annotations

import math
import mmap
import stat
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from lmi_server.configuration.model_directory.gguf_faults import header_fault, tokenizer_fault
from lmi_server.contract.errors import ConfigurationError
from lmi_server.contract.texts.quoting import excerpt

# By `general.architecture`: the class of transformers that decodes such a file under the rolling batch.
ARCHITECTURES: Mapping[str, str] = {
    "gemma2": "Gemma2ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "stablelm": "StableLmForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
}
# Keys of config.json by the keys of GGUF below the architecture.
_CONFIG_KEYS = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "context_length": "max_position_embeddings",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "expert_count": "num_experts",
}
_MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
_DIMENSIONS = 4  # of a tensor, at most
# Many times what the largest models have. The package gguf, which reads the header again when the model loads, makes
# objects of Python of all keys, tensors and elements of arrays.
_MAX_KEYS, _MAX_TENSORS, _MAX_ELEMENTS = 2**12, 2**14, 2**22
_MAX_NAME = 2**16 - 1  # bytes
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
# By ggml's number of a tensor type: weights in a block, and bytes of a block.
# fmt: off
_BLOCKS = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 9: (32, 40),
    10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 15: (256, 292), 16: (256, 66),
    17: (256, 74), 18: (256, 98), 19: (256, 50), 20: (32, 18), 21: (256, 110), 22: (256, 82), 23: (256, 136),
    24: (1, 1), 25: (1, 2), 26: (1, 4), 27: (1, 8), 28: (1, 8), 29: (256, 56), 30: (1, 2), 34: (256, 54),
    35: (256, 66), 39: (32, 17), 40: (64, 36), 41: (128, 18),
}
# fmt: on
# Of the types that stay in blocks on a CPU. Those in Q5_0 have numbers of 8 bits there.
_BLOCKS_IN_MEMORY = {kind: _BLOCKS[kind] for kind in (2, 3, 8, 12, 13, 14)} | {6: _BLOCKS[8]}


class _WrongHeaderError(ValueError):
    """The header has what no writer of such files writes."""


class _Tensor(NamedTuple):
    """A tensor: where it begins and ends behind the header. `end` is None if its type is not known here."""

    name: str
    shape: tuple[int, ...]
    parameters: int
    offset: int
    end: int | None
    held: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What the header says: `values` by key (of arrays, their lengths), and the sizes of the tensors by name.

    `parameters` are their weights. `end` is the size that the file must have at least; None if a tensor is of a type
    that is not known here. `held` are the bytes of the weights on a CPU, where blocks stay as they are and others
    become bfloat16.
    """

    values: Mapping[str, Any]
    tensors: Mapping[str, tuple[int, ...]]
    parameters: int
    end: int | None
    held: int

    @property
    def architecture(self) -> str:
        return str(self.values.get("general.architecture", ""))

    def problem(self) -> str | None:
        """Return why transformers would not read the file as it is meant; None if it does."""
        if self.architecture not in ARCHITECTURES:
            allowed = ", ".join(sorted(ARCHITECTURES))
            return f"general.architecture = {excerpt(self.architecture)} is not served from GGUF; allowed: {allowed}"
        if self.values.get("split.count", 1) not in (0, 1):
            return "is one part of several; merge them with llama-gguf-split --merge"
        scaling = self.values.get(f"{self.architecture}.rope.scaling.type", "none")
        if scaling != "none" or any(name.startswith("rope_f") for name in self.tensors):
            return "scales its rotary positions, which transformers does not read from GGUF"
        return None

    def fault(self, path: Path) -> str | None:
        """Return what is wrong with the file, which has this header; None if it can be loaded as far as that says."""
        return (
            self.size_fault(path.stat().st_size)
            or (header_fault(self.architecture, self.values, self.tensors) if self.problem() is None else None)
            or (None if (path.parent / "tokenizer.json").is_file() else tokenizer_fault(self.values))
        )

    def size_fault(self, size: int) -> str | None:
        """Return what is wrong with a file of so many bytes; None if it has all that the header names."""
        if self.end is None or size >= self.end:
            return None
        return f"has {size} bytes, and by its header it should have {self.end}; copy it again"

    def config(self) -> Mapping[str, Any]:
        """Return the keys of config.json that follow from the header. The weights are loaded as bfloat16."""
        config = {
            name: self.values[key]
            for key, name in ((f"{self.architecture}.{key}", name) for key, name in _CONFIG_KEYS.items())
            if key in self.values
        }
        config["vocab_size"] = self.values.get("tokenizer.ggml.tokens", 0)
        config["tie_word_embeddings"] = "output.weight" not in self.tensors
        known = ARCHITECTURES.get(self.architecture)
        return {**config, "dtype": "bfloat16", "architectures": [known] if known else []}


def is_gguf(location: str) -> bool:
    """Return whether the location of a model is a file in GGUF on this machine, and no address of one."""
    return location.startswith("/") and location.endswith(".gguf")


def gguf_files(directory: Path) -> list[Path]:
    """Return the models in GGUF that a directory holds; projectors of images (mmproj) are none."""
    return sorted(path for path in directory.glob("*.gguf") if not path.name.startswith("mmproj"))


def read_gguf(path: Path) -> GgufHeader:
    """Read the header of the file. Raises ConfigurationError if it cannot be read."""
    try:
        state = path.stat()
        if not stat.S_ISREG(state.st_mode):  # opening a named pipe waits for its writer
            raise ConfigurationError(f"{path}: is no file; put a model in GGUF there, or take it away")
        return _read(path, state.st_size, state.st_mtime_ns)
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read: {error.strerror}") from error
    except _WrongHeaderError as error:
        raise ConfigurationError(f"{path}: {error}; the file is damaged, copy it again") from error
    except (ValueError, ArithmeticError, struct.error, IndexError, KeyError) as error:
        raise ConfigurationError(f"{path}: is no file in GGUF, or is cut within its header; copy it again") from error


@lru_cache(maxsize=16)  # a header lists every token of the vocabulary, and one start asks for it several times
def _read(path: Path, size: int, changed_at: int) -> GgufHeader:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _HeaderReader(data).header()


class _HeaderReader:
    """A position in the header."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0
        self._elements = 0  # of arrays, so far

    def header(self) -> GgufHeader:
        if self._data[:4] != _MAGIC:
            raise ValueError("no GGUF")
        self._at = 4
        if self._scalar("I") not in (2, 3):
            raise ValueError("unknown version")
        tensor_count, key_count = self._scalar("Q"), self._scalar("Q")
        _refuse_more_than(_MAX_KEYS, key_count, "keys")
        _refuse_more_than(_MAX_TENSORS, tensor_count, "tensors")
        values = self._values(key_count)
        alignment = _alignment(values.get("general.alignment", 32))
        tensors = [self._tensor() for _ in range(tensor_count)]
        _refuse_shared_bytes(tensors, alignment)
        start = -(-self._at // alignment) * alignment
        known = [tensor.end for tensor in tensors if tensor.end is not None]
        return GgufHeader(
            values=values,
            tensors={tensor.name: tensor.shape for tensor in tensors},
            parameters=sum(tensor.parameters for tensor in tensors),
            end=start + max(known, default=0) if len(known) == len(tensors) else None,
            held=sum(tensor.held for tensor in tensors) + _held_as_head(tensors),
        )

    def _values(self, count: int) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for _ in range(count):
            key = self._name()
            if key in values:
                raise _WrongHeaderError(f"has the key {excerpt(key)} twice")
            value = values[key] = self._value(self._scalar("I"))
            if isinstance(value, float) and not math.isfinite(value):
                raise _WrongHeaderError(f"{excerpt(key)} = {value} is no number")
        return values

    def _tensor(self) -> _Tensor:
        name, dimensions = self._name(), self._scalar("I")
        if dimensions > _DIMENSIONS:
            raise ValueError("more dimensions than ggml has")  # whose product would take ever longer
        shape = [self._scalar("Q") for _ in range(dimensions)]
        kind, offset = self._scalar("I"), self._scalar("Q")
        inputs, size = _BLOCKS_IN_MEMORY.get(kind, (1, 2))
        held = math.prod(shape) * size // inputs
        return _Tensor(name, tuple(shape), math.prod(shape), offset, _end_of(shape, kind, offset), held)

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._text()
        return self._skip_array() if kind == _ARRAY else self._scalar(_SCALARS[kind])

    def _skip_array(self) -> int:
        """Move behind an array, and return its length."""
        kind, count = self._scalar("I"), self._scalar("Q")
        self._elements += count
        _refuse_more_than(_MAX_ELEMENTS, self._elements, "elements of arrays")
        if kind != _STRING:
            self._at += count * struct.calcsize(_SCALARS[kind])
            return int(count)
        data, at, length_of = self._data, self._at, struct.Struct("<Q").unpack_from
        for _ in range(count):
            at += 8 + length_of(data, at)[0]
        self._at = at
        return int(count)

    def _name(self) -> str:
        return self._text(_MAX_NAME)

    def _text(self, longest: int | None = None) -> str:
        length = self._scalar("Q")
        if longest is not None:
            _refuse_more_than(longest, length, "bytes in a name")
        text = self._data[self._at : self._at + length]
        if len(text) < length:
            raise ValueError("cut")
        self._at += length
        return text.decode("utf-8", "replace")

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self._data, self._at)
        self._at += struct.calcsize(f"<{code}")
        return value


def _refuse_more_than(most: int, count: int, what: str) -> None:
    if count > most:
        raise _WrongHeaderError(f"has {count} {what} in its header, and {most} are the most that is read")


def _alignment(value: Any) -> int:
    """Return the number of bytes that divides where tensors begin."""
    if type(value) is not int or value < 1 or value & (value - 1):
        raise _WrongHeaderError(f"general.alignment = {excerpt(str(value))} is no power of two")
    return value


def _refuse_shared_bytes(tensors: Sequence[_Tensor], alignment: int) -> None:
    """Refuse names that occur twice, and tensors that begin elsewhere than a writer puts them, or inside of others."""
    names: set[str] = set()
    end, before = 0, ""
    for tensor in sorted(tensors, key=lambda each: each.offset):
        name = excerpt(tensor.name)
        if tensor.name in names:
            raise _WrongHeaderError(f"has the tensor {name} twice")
        if tensor.offset % alignment:
            raise _WrongHeaderError(f"tensor {name} begins at {tensor.offset}, which is no multiple of {alignment}")
        if tensor.offset < end:
            raise _WrongHeaderError(f"tensor {name} begins inside of tensor {before}")
        names.add(tensor.name)
        end, before = tensor.end or tensor.offset, name


def _held_as_head(tensors: Sequence[_Tensor]) -> int:
    """Return the bytes of a head that shares the weights of embeddings: blocks are laid out for it a second time."""
    embeddings = next((tensor for tensor in tensors if tensor.name == "token_embd.weight"), None)
    if embeddings is None or any(tensor.name == "output.weight" for tensor in tensors):
        return 0
    return embeddings.held if embeddings.held < 2 * embeddings.parameters else 0


def _end_of(shape: Sequence[int], kind: int, offset: int) -> int | None:
    if kind not in _BLOCKS:
        return None
    weights, size = _BLOCKS[kind]
    return offset + math.prod(shape) // weights * size
