"""Finds what is missing, cut or only a pointer among the files of a checkpoint, from names, sizes and headers alone."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

from lmi_server.configuration.model_directory.checkpoint import IS_POINTER, MAX_HEADER_BYTES, is_pointer
from lmi_server.configuration.model_directory.gguf import read_gguf
from lmi_server.contract.errors import ConfigurationError
from lmi_server.files.regular_files import read_regular

_MAX_INDEX_BYTES = 1 << 26

_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
# Parts of the names that files of tokenizers have: tokenizer.json, vocab.txt, merges.txt, spiece.model, qwen.tiktoken.
_TOKENIZER = ("token", "vocab", "merges", "spiece", "sentencepiece", ".spm", "tekken")
# These say how a tokenizer is used, and hold none.
_ABOUT_TOKENIZERS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
# Classes of tokenizers that take bytes or characters for tokens, and have no files.
_WITHOUT_FILES = ("ByT5Tokenizer", "CanineTokenizer", "PerceiverTokenizer")
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.\w+)")
_ZIP, _END_OF_ZIP = b"PK\x03\x04", b"PK\x05\x06"
_END_BYTES = 1 << 16


def file_faults(directory: Path, needs_tokenizer: bool) -> Iterator[str]:
    """Yield a line for each file of the checkpoint in `directory` that is missing or damaged."""
    yield from _pointers(directory)
    yield from _cut_json(directory)
    weights = sorted({path for pattern in _WEIGHTS for path in directory.glob(pattern)})
    named = [path for index in _INDEXES for path in _shards(directory / index)]
    beside = _shards_by_name(weights)
    if not weights and not named:
        yield f"{directory}: holds no weights ({', '.join(_WEIGHTS)}); copy them into it, or set option.model_id"
    for path in sorted({*weights, *named, *beside}):
        fault = _fault(path)
        if fault is not None:
            yield f"{path}: {fault}"
    if needs_tokenizer and not _has_tokenizer(directory):
        yield f"{directory}: holds no tokenizer (tokenizer.json, tokenizer.model or others); copy its files into it"


def pipeline_faults(index: Path) -> Iterator[str]:
    """Yield a line for each part of a pipeline of diffusers that is missing or damaged.

    `index` is its model_index.json, which names the parts, each in a directory of its own.
    """
    try:
        parts = json.loads(read_regular(index))
        names = [name for name, value in parts.items() if isinstance(value, list) and None not in value]
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        yield f"{index}: cannot be read: {error}; copy it again"
        return
    for name in names:
        part = index.parent / name
        if part.is_dir():
            yield from _part_faults(part)
        else:
            yield f"{part}: is missing, and {index.name} names it; copy it again"


def _part_faults(part: Path) -> Iterator[str]:
    yield from _pointers(part)
    yield from _cut_json(part)
    named = [path for shards in part.glob("*.safetensors.index.json") for path in _shards(shards)]
    weights = sorted({*part.glob("*.safetensors"), *named})
    for path in weights:
        fault = _fault(path)
        if fault is not None:
            yield f"{path}: {fault}"
    pickled = sorted(part.glob("*.bin"))
    if pickled and not weights:
        yield f"{pickled[0]}: is pickled, and only safetensors are loaded; name a revision that has them, or convert it"


def _has_tokenizer(directory: Path) -> bool:
    names = {path.name.lower() for path in directory.iterdir()} - set(_ABOUT_TOKENIZERS)
    return any(part in name for name in names for part in _TOKENIZER) or _tokenizer_class(directory) in _WITHOUT_FILES


def _tokenizer_class(directory: Path) -> str:
    try:
        config = json.loads(read_regular(directory / "tokenizer_config.json"))
    except (OSError, ValueError, RecursionError):
        return ""
    return str(config.get("tokenizer_class")) if isinstance(config, dict) else ""


def _cut_json(directory: Path) -> Iterator[str]:
    """Yield a line for each JSON file of the model that does not end as one."""
    for path in sorted(directory.glob("*.json")):
        if path.is_file() and not is_pointer(path) and not _end(path, 64).rstrip().endswith((b"}", b"]")):
            yield f"{path}: is cut: it does not end as JSON does; copy it again"


def _pointers(directory: Path) -> Iterator[str]:
    """Yield a line for each small file that only says where Git LFS has the real one."""
    for path in sorted(directory.iterdir()):
        if path.is_file() and path.stat().st_size < 1024 and is_pointer(path):
            yield f"{path}: {IS_POINTER}"


def _shards(index: Path) -> list[Path]:
    """Return the files that an index names; none if there is no index that can be read."""
    try:
        names = json.loads(read_regular(index, _MAX_INDEX_BYTES))["weight_map"].values()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return []
    return [index.parent / str(name) for name in names]


def _shards_by_name(weights: Sequence[Path]) -> list[Path]:
    """Return all shards of the weights: the name of each says how many there are."""
    matches = [(path, found) for path in weights if (found := _SHARD.fullmatch(path.name)) is not None]
    return [
        path.with_name(f"{found[1]}-{number:05}-of-{found[3]}{found[4]}")
        for path, found in matches
        for number in range(1, int(found[3]) + 1)
    ]


def _fault(path: Path) -> str | None:
    if not path.is_file():
        return "is missing, and the index or the other shards of the weights name it; copy it again"
    if is_pointer(path):
        return None  # reported as a pointer
    if not path.stat().st_size:
        return "is empty; copy it again"
    if path.suffix == ".gguf":
        return gguf_fault(path)
    return _safetensors_fault(path) if path.suffix == ".safetensors" else _zip_fault(path)


def gguf_fault(path: Path) -> str | None:
    """Return what is wrong with a file in GGUF, by its size and its header."""
    try:
        return read_gguf(path).fault(path)
    except ConfigurationError as error:
        return error.message.removeprefix(f"{path}: ")


def _safetensors_fault(path: Path) -> str | None:
    """Compare the size of the file with the end of the last tensor that its header names."""
    size = path.stat().st_size
    if size < 8:
        return f"has {size} bytes and no header; copy it again"
    (length,) = struct.unpack("<Q", _beginning(path, 8))
    if length > min(size - 8, MAX_HEADER_BYTES):
        return "is cut within its header, or is no safetensors file; copy it again"
    try:
        header = json.loads(_beginning(path, 8 + length)[8:])
        ends = [int(tensor["data_offsets"][1]) for name, tensor in header.items() if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError):
        return "has a header that cannot be read; copy it again"
    end = 8 + length + max(ends, default=0)
    return None if size == end else f"has {size} bytes, and by its header it should have {end}; copy it again"


def _zip_fault(path: Path) -> str | None:
    """Look for the end of the archive that torch.save writes; a file of another kind passes."""
    if _beginning(path, len(_ZIP)) != _ZIP:
        return None
    return None if _END_OF_ZIP in _end(path, _END_BYTES) else "is cut: the end of the archive is missing; copy it again"


def _end(path: Path, length: int) -> bytes:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - length))
        return file.read()


def _beginning(path: Path, length: int) -> bytes:
    with path.open("rb") as file:
        return file.read(length)
