"""Objects on S3. What a server would append to a file is one more object there: S3 has no appending.

A journal belongs to the process whose lease it has. A lease ends some time after its owner's last sign of life. A
second owner cannot harm the first: each writes the next object only if there is none (If-None-Match), and the one that
is late finds out.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from tempfile import TemporaryFile
from typing import Any, BinaryIO, cast

from frontend.storage.objects import Entry
from lmi_server.contract.errors import ConfigurationError
from lmi_server.files.journal import TakenError

_LEASE_S = 60.0
_RENEWED_S = 15.0
_READERS = 16
_CONNECTIONS = 64  # as many as all threads of a feature need
_CONNECT_S = 10
_LEASE = "lease"
_CHANGED = frozenset({"PreconditionFailed", "ConditionalRequestConflict", "412", "409"})
_MISSING = frozenset({"NoSuchKey", "404"})
_PAST_END = "InvalidRange"


class S3Objects:
    """Keeps objects in a bucket, below `prefix`."""

    def __init__(self, bucket: str, prefix: str, setting: str) -> None:
        """Raise ConfigurationError, which names `setting`, without boto3 or a region."""
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._client = aws_client("s3", setting)

    def put(self, key: str, data: bytes) -> None:
        self.put_if(key, data)

    def put_if(self, key: str, data: bytes, **conditions: str) -> str:
        """Keep `data`, and return its ETag. Raises TakenError if it does not meet the `conditions`."""
        with self._errors():
            answer = self._client.put_object(Bucket=self._bucket, Key=self._prefix + key, Body=data, **conditions)
            return str(answer["ETag"])

    def get(self, key: str) -> bytes | None:
        found = self.get_tagged(key)
        return None if found is None else found[0]

    def get_tagged(self, key: str) -> tuple[bytes, str] | None:
        """Return the whole object and its ETag, None if there is none."""
        try:
            with self._errors():
                found = self._client.get_object(Bucket=self._bucket, Key=self._prefix + key)
                return found["Body"].read(), found["ETag"]
        except FileNotFoundError:
            return None

    def read(self, key: str, offset: int, size: int) -> bytes:
        wanted = f"bytes={offset}-{offset + size - 1}"
        with self._errors():
            try:
                found = self._client.get_object(Bucket=self._bucket, Key=self._prefix + key, Range=wanted)
            except self._client.exceptions.ClientError as error:
                if error.response["Error"]["Code"] == _PAST_END:
                    return b""
                raise
            return bytes(found["Body"].read())

    @contextlib.contextmanager
    def writer(self, key: str) -> Iterator[BinaryIO]:
        with TemporaryFile() as file:
            yield cast("BinaryIO", file)
            file.seek(0)
            with self._errors():
                self._client.upload_fileobj(file, self._bucket, self._prefix + key)

    def remove(self, key: str) -> None:
        with self._errors():
            self._client.delete_object(Bucket=self._bucket, Key=self._prefix + key)

    def entries(self, folder: str) -> list[Entry]:
        start = f"{self._prefix}{folder}/"
        pages = self._pages(start)
        return [
            Entry(each["Key"].removeprefix(start), each["Size"]) for page in pages for each in page.get("Contents", ())
        ]

    def folders(self) -> list[str]:
        below = (each["Prefix"] for page in self._pages(self._prefix) for each in page.get("CommonPrefixes", ()))
        return [name.removeprefix(self._prefix).rstrip("/") for name in below]

    def _pages(self, prefix: str) -> Iterator[dict[str, Any]]:
        """Yield what is right below a prefix."""
        with self._errors():
            paginator = self._client.get_paginator("list_objects_v2")
            yield from paginator.paginate(Bucket=self._bucket, Prefix=prefix, Delimiter="/")

    def remove_abandoned(self) -> None:
        """Do nothing: parts of objects are removed by a rule of the bucket (AbortIncompleteMultipartUpload)."""

    def journal(self, key: str) -> S3Journal:
        return S3Journal(self, key)

    def remove_journal(self, key: str) -> None:
        for entry in self.entries(key):
            self.remove(f"{key}/{entry.name}")

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Raise boto3's errors as OSErrors: TakenError and FileNotFoundError for what they say."""
        from botocore.exceptions import ClientError

        with as_os_errors(f"s3://{self._bucket}"):
            try:
                yield
            except ClientError as error:
                code = error.response["Error"]["Code"]
                if code in _CHANGED:
                    raise TakenError(f"s3://{self._bucket}: another process was faster") from error
                if code in _MISSING:
                    raise FileNotFoundError(f"s3://{self._bucket}: there is no such object") from error
                raise


class S3Journal:
    """Numbered objects below a key, and the lease."""

    def __init__(self, store: S3Objects, key: str) -> None:
        self._store = store
        self._key = key
        self._owner = secrets.token_hex(8)
        self._guard = threading.Lock()
        self._tag = self._take_lease()
        self._renewed = time.monotonic()
        self._names = [entry.name for entry in store.entries(key) if entry.name != _LEASE]

    def _take_lease(self) -> str:
        found = self._store.get_tagged(self._lease)
        if found is None:
            return self._write_lease(IfNoneMatch="*")
        data, tag = found
        if _lease_end(data) > time.time():
            raise TakenError(f"another process has {self._key}")
        return self._write_lease(IfMatch=tag)

    def _write_lease(self, **conditions: str) -> str:
        lease = {"owner": self._owner, "until": time.time() + _LEASE_S}
        return self._store.put_if(self._lease, json.dumps(lease).encode(), **conditions)

    @property
    def _lease(self) -> str:
        return f"{self._key}/{_LEASE}"

    def blocks(self) -> Iterator[bytes]:
        with ThreadPoolExecutor(_READERS) as readers:
            for start in range(0, len(self._names), _READERS):
                self.keep()  # a long journal takes longer to read than the lease lasts
                yield from readers.map(self._part, self._names[start : start + _READERS])

    def _part(self, name: str) -> bytes:
        data = self._store.get(f"{self._key}/{name}")
        if data is None:
            raise OSError(f"{self._key}/{name} is gone")
        return data

    def append(self, data: bytes) -> None:
        with self._guard:
            name = f"{len(self._names):09d}"
            self._store.put_if(f"{self._key}/{name}", data, IfNoneMatch="*")
            self._names.append(name)

    def keep(self) -> None:
        with self._guard:
            if time.monotonic() - self._renewed > _RENEWED_S:
                self._tag = self._write_lease(IfMatch=self._tag)
                self._renewed = time.monotonic()

    def close(self) -> None:
        with self._guard, contextlib.suppress(OSError):  # it ends by itself then
            self._store.put_if(self._lease, b'{"until": 0}', IfMatch=self._tag)


def _lease_end(data: bytes) -> float:
    try:
        return float(json.loads(data)["until"])
    except (ValueError, TypeError, KeyError):
        return 0.0


def aws_client(service: str, key: str) -> Any:
    """Return a client with the credentials, region and endpoint of the places that all AWS tools read.

    Raises ConfigurationError, which names `key`, without boto3 or a region.
    """
    try:
        import boto3
    except ImportError as error:
        raise ConfigurationError(f'{key} needs boto3 ({error}); pip install "lmi-server[s3]"') from error
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError

    try:
        config = Config(max_pool_connections=_CONNECTIONS, connect_timeout=_CONNECT_S)
        return boto3.session.Session().client(service, config=config)
    except BotoCoreError as error:
        raise ConfigurationError(f"{key}: {error}; set it as for other tools of AWS") from error


@contextlib.contextmanager
def as_os_errors(place: str) -> Iterator[None]:
    """Raise boto3's errors as an OSError that names `place`."""
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield
    except (BotoCoreError, ClientError) as error:
        raise OSError(f"{place}: {error}") from error
