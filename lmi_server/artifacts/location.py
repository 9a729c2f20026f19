"""Parses the location of a model: the grammar of `option.model_id` and of a model's URL. Opens no connection."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

# What a user may name as a model, for messages.
MODEL_FORMS = (
    "a directory, an archive, a file in GGUF, a model file of Ray in YAML, owner/name of the Hugging Face Hub,"
    " s3://bucket/prefix, gs://bucket/prefix, or a file: URL"
)
BUCKETS = ("s3://", "gs://")
"""How the URL of a bucket begins that the server fetches from."""
ARCHIVE_SUFFIXES = (".tar.gz", ".tgz", ".tar", ".zip", ".mar")

MODEL_FILE_SUFFIXES = (".yaml", ".yml")
RAY_MODEL_FILE = "ray-model.yaml"
"""The name of a model file in a model directory, which takes the place of serving.properties."""
RAY_MODEL_NAME = "ray-model.name"
"""The name of a file beside it that says which model of an application file the directory has."""

WORKFLOW_SUFFIXES = (".json", ".yml", ".yaml")
NO_WORKFLOWS = "workflows are not served; register each of its models by itself, and call one after the other"

_RECOMMENDED_FILE = re.compile(r"[\w.-]+_[\w.-]+_tp\d+\.yaml", re.ASCII)
_HUB_ID = re.compile(r"(?=[^:]{1,96}(:|$))[A-Za-z0-9][\w.-]*(/[\w.-]+(:[\w.-]+)?)?")
_QUERY = re.compile(r"[?#]")
_GGUF = ".gguf"
_FILE = "file:"
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")


@dataclass(frozen=True, slots=True)
class LocalDirectory:
    """A directory, by its absolute path."""

    path: Path


@dataclass(frozen=True, slots=True)
class LocalArchive:
    """An archive file, by its absolute path."""

    path: Path


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A model in GGUF, by the absolute path of its one file."""

    path: Path


@dataclass(frozen=True, slots=True)
class LocalModelFile:
    """A model file of Ray, by its absolute path: YAML that describes a model and says where its weights are.

    Of an application file, which describes several, `member` names one.
    """

    path: Path
    member: str | None = None


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model on the Hugging Face Hub; of several files in GGUF, the one with `quantization` in its name."""

    repo_id: str
    quantization: str | None = None

    @property
    def id(self) -> str:
        """Return "owner/name", or "owner/name:quantization"."""
        return self.repo_id if self.quantization is None else f"{self.repo_id}:{self.quantization}"


@dataclass(frozen=True, slots=True)
class S3Location:
    """All objects below `prefix` (without a slash at its end), or the archive with this key.

    `scheme` is "gs" for Google Cloud Storage, which speaks S3's protocol as well.
    """

    bucket: str
    prefix: str
    scheme: str = "s3"

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.prefix}"


Location = LocalDirectory | LocalArchive | GgufFile | LocalModelFile | HubModel | S3Location


def parse_location(text: str, base: Path) -> Location:
    """Return the location that `text` names; a relative path is relative to `base`.

    Raises ValueError with a text that continues a message after key and value: "is not allowed; ...".
    """
    if text.startswith(_FILE):
        return _local(path_of_file_url(text), base)
    if has_scheme(text):
        return _remote(text)
    if os.path.exists(base / text) or _HUB_ID.fullmatch(text) is None or archive_stem(text) is not None:
        return _local(text, base)
    repo_id, _, quantization = text.partition(":")
    return HubModel(repo_id, quantization or None)


def names_model_file(text: str) -> bool:
    """Return whether `text` names a model file of Ray, or a model of an application file."""
    try:
        return isinstance(parse_location(text, Path.cwd()), LocalModelFile)
    except ValueError:
        return False


def how_to_write(path: Path) -> str:
    """Return what a message about a missing file adds if `lmi-server ray model-files` may write it; otherwise ""."""
    if _RECOMMENDED_FILE.fullmatch(path.name) is None:
        return ""
    return f"; lmi-server ray model-files {path.parent} {path.name} writes a recommended model file"


def has_scheme(text: str) -> bool:
    """Return whether `text` is a URL, and so no relative path and no id."""
    return text.startswith(_FILE) or "://" in text


def local_path(text: str, base: Path) -> str | None:
    """Return the absolute path that a path or file: URL means; None for any other URL."""
    if text.startswith(_FILE):
        return os.path.abspath(base / path_of_file_url(text))
    return None if has_scheme(text) else os.path.abspath(base / text)


def resolved_path(path: str) -> str:
    """Return the path without links and "..", but with the name of a linked file, whose suffix says what it is.

    So `parse_location` says the same of it, and what it means does not change with a link on the way.
    """
    real = os.path.realpath(path)
    if os.path.isdir(real) or os.path.splitext(real)[1] == os.path.splitext(path)[1]:
        return real
    return os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))


def path_of_file_url(url: str) -> str:
    """Return the path of a file: URL. Any text has one, unlike with urlsplit: a bracket begins no IPv6 address here."""
    rest = _QUERY.split(url.removeprefix("file:"), maxsplit=1)[0]
    if rest.startswith("//"):
        rest = "".join(rest[2:].partition("/")[1:])  # without the host
    return unquote(rest)


def is_hub_id(text: str) -> bool:
    """Return whether `text` has the form owner/name, or owner/name:quantization, as models of the Hub have."""
    return "/" in text and _HUB_ID.fullmatch(text) is not None and archive_stem(text) is None


def archive_stem(name: str) -> str | None:
    """Return the file name without its archive suffix; None if it has no such suffix."""
    file_name = name.rpartition("/")[2]
    for suffix in ARCHIVE_SUFFIXES:
        if file_name.lower().endswith(suffix) and len(file_name) > len(suffix):
            return file_name[: -len(suffix)]
    return None


def refuse_remote_entry_point(entry_point: str) -> None:
    """Raise ValueError if `option.entryPoint` is a URL; its text continues a message after key and value.

    LMI downloads and runs the file at that URL. The owner of the URL would control the server, so this server runs
    only code that is part of the model.
    """
    if "://" in entry_point and not entry_point.startswith("file:"):
        raise ValueError(
            "is not allowed: the server downloads no code; put the file into the model directory "
            "and set option.entryPoint to its name (model.py)"
        )


def _local(path: str, base: Path) -> LocalDirectory | LocalArchive | GgufFile | LocalModelFile:
    local = Path(os.path.abspath(base / path))  # an absolute path replaces base
    # Functions of os.path return False for a text that is too long for a path; methods of Path raise OSError.
    if os.path.isdir(local):
        return LocalDirectory(local)
    if local.suffix == _GGUF and os.path.isfile(local):
        return GgufFile(local)
    if local.suffix in MODEL_FILE_SUFFIXES and os.path.isfile(local):
        return LocalModelFile(local)  # whether it is one, or a workflow, says its reader
    file, _, member = path.partition("#")
    if member and file.endswith(MODEL_FILE_SUFFIXES) and os.path.isfile(base / file):
        return LocalModelFile(Path(os.path.abspath(base / file)), member)
    if local.suffix in WORKFLOW_SUFFIXES and os.path.isfile(local):
        raise ValueError(f"is not available: {local} defines a workflow; {NO_WORKFLOWS}")
    if archive_stem(local.name) is None:
        if os.path.exists(local):
            raise ValueError(f"is not allowed; {local} is neither a directory nor a {_suffixes()} archive nor in GGUF")
        raise ValueError(f"is not allowed; there is no directory {local}, and it is no id of a Hugging Face model")
    if not os.path.isfile(local):
        raise ValueError(f"is not allowed; there is no archive {local}")
    return LocalArchive(local)


def _remote(url: str) -> S3Location:
    scheme, _, rest = url.partition("://")
    if f"{scheme}://" not in BUCKETS:
        raise ValueError(f"is not available: {_REMEDIES.get(scheme, _OTHER_SCHEMES)}")
    # urlsplit would cut the key at "?" and "#", which are ordinary characters in it.
    bucket, _, prefix = rest.partition("/")
    if _BUCKET.fullmatch(bucket) is None:
        raise ValueError(f"is not allowed; allowed: {scheme}://bucket/prefix")
    return S3Location(bucket, prefix.strip("/"), scheme)


def _suffixes() -> str:
    return "/".join(ARCHIVE_SUFFIXES)


_OTHER_SCHEMES = (
    "use a local directory or archive, the id of a Hugging Face model, s3://bucket/prefix or gs://bucket/prefix"
)
_DOWNLOAD_FIRST = "the server fetches no model over HTTP; download it and name the local directory or archive"
_REMEDIES = {"http": _DOWNLOAD_FIRST, "https": f"{_DOWNLOAD_FIRST} (of huggingface.co, give the model's id alone)"}
