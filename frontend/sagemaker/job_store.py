"""Where the answers of asynchronous jobs are kept beside this process: a directory, a bucket on S3, or DynamoDB.

What is kept there is found again after a restart, and by other servers with the same store.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import msgspec

from frontend.detached.request import KeptAnswer
from frontend.http.held_bytes import MemoryBudget
from frontend.sagemaker.settings import JobSettings
from frontend.storage.s3 import as_os_errors, aws_client
from lmi_server.configuration.server_settings import ServerSettings
from lmi_server.contract.errors import ConfigurationError

_PART = 350_000  # bytes of an answer in an item of DynamoDB, which takes 400 KB with the names of its attributes
_ID, _NUMBER, _DATA, _TTL = "CacheId", "StartItem", "Data", "TTL"


class JobRecord(KeptAnswer):
    """The answer of a job, as far as there is one.

    `owner` says which process runs the job. `expires` is in seconds since 1970.
    """

    owner: str = ""
    finished: bool = False
    expires: float = 0.0


class JobStore(Protocol):
    """Keeps the answers of jobs, each under its token. Every method may block, and raises OSError if it fails."""

    def save(self, token: str, record: JobRecord) -> None:
        """Keep the answer in place of what there was of it."""

    def load(self, token: str) -> JobRecord | None:
        """Return the answer, None if there is none."""

    def remove(self, token: str) -> None:
        """Forget the answer, if there is one."""


def memory_for_answers(settings: ServerSettings) -> MemoryBudget:
    """Return the memory for the answers of all asynchronous jobs and invocations."""
    limit = settings.part(JobSettings).async_jobs_size
    return MemoryBudget(
        limit, f"the answers that are kept take async_jobs_size={limit} bytes; read or end some jobs, or raise it"
    )


def job_store(settings: ServerSettings) -> JobStore | None:
    """Return the store that the settings name, None if they name none. Raises ConfigurationError if they name two."""
    asked = settings.part(JobSettings)
    named = [
        name
        for name, is_set in {
            "async_jobs_dir": asked.async_jobs_dir is not None,
            "s3_cache": asked.s3_cache,
            "ddb_cache": asked.ddb_cache,
        }.items()
        if is_set
    ]
    if len(named) > 1:
        raise ConfigurationError(f"{' and '.join(named)} are set; answers of jobs are kept in one place: set one")
    if asked.async_jobs_dir is not None:
        return DirectoryStore(Path(asked.async_jobs_dir))
    if asked.s3_cache:
        if asked.s3_cache_bucket is None:
            raise ConfigurationError("s3_cache = true needs s3_cache_bucket, the bucket for the answers of jobs")
        return S3Store(asked.s3_cache_bucket, asked.s3_cache_key_prefix, asked.s3_cache_autocreate)
    return DynamoStore(asked.ddb_table_name) if asked.ddb_cache else None


class DirectoryStore:
    """One file for each job. Expired ones are removed when the next one is saved."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(f'async_jobs_dir = "{directory}" cannot be used: {error}') from error

    def save(self, token: str, record: JobRecord) -> None:
        self._remove_expired()
        path = self._directory / token
        new = path.with_suffix(f".{threading.get_ident()}")
        new.write_bytes(msgspec.msgpack.encode(record))
        os.utime(new, (record.expires, record.expires))  # by which `_remove_expired` knows
        new.replace(path)

    def load(self, token: str) -> JobRecord | None:
        try:
            return _decode((self._directory / token).read_bytes())
        except FileNotFoundError:
            return None

    def remove(self, token: str) -> None:
        (self._directory / token).unlink(missing_ok=True)

    def _remove_expired(self) -> None:
        now = time.time()
        for entry in os.scandir(self._directory):
            with contextlib.suppress(FileNotFoundError):  # another server was faster
                if entry.stat().st_mtime < now:
                    os.unlink(entry.path)


class S3Store:
    """One object for each job. What has expired is not read; a lifecycle rule of the bucket removes it."""

    def __init__(self, bucket: str, prefix: str, creates_bucket: bool) -> None:
        self._bucket = bucket
        self._prefix = prefix
        self._creates_bucket = creates_bucket
        self._client = aws_client("s3", "s3_cache")

    def save(self, token: str, record: JobRecord) -> None:
        with as_os_errors(f"s3://{self._bucket}"):
            if self._creates_bucket:
                with contextlib.suppress(self._client.exceptions.BucketAlreadyOwnedByYou):
                    self._client.create_bucket(**_place(self._bucket, self._client.meta.region_name))
                self._creates_bucket = False
            self._client.put_object(Bucket=self._bucket, Key=self._key(token), Body=msgspec.msgpack.encode(record))

    def load(self, token: str) -> JobRecord | None:
        with as_os_errors(f"s3://{self._bucket}"):
            try:
                found = self._client.get_object(Bucket=self._bucket, Key=self._key(token))
            except (self._client.exceptions.NoSuchKey, self._client.exceptions.NoSuchBucket):
                return None
            return _decode(found["Body"].read())

    def remove(self, token: str) -> None:
        with as_os_errors(f"s3://{self._bucket}"):
            self._client.delete_object(Bucket=self._bucket, Key=self._key(token))

    def _key(self, token: str) -> str:
        return f"{self._prefix}{token}"


class DynamoStore:
    """Items of one table, which is made if it is not there; long answers have several. They expire by its TTL."""

    def __init__(self, table: str) -> None:
        self._table = table
        self._client = aws_client("dynamodb", "ddb_cache")
        self._is_made = False

    def save(self, token: str, record: JobRecord) -> None:
        data = msgspec.msgpack.encode(record)
        with as_os_errors(f"table {self._table} of DynamoDB"):
            self._make_table()
            parts = range(0, len(data), _PART)
            # The first part goes last: who finds it finds all of them.
            for number, start in reversed(list(enumerate(parts))):
                item = {
                    _ID: {"S": token},
                    _NUMBER: {"N": str(number)},
                    _DATA: {"B": data[start : start + _PART]},
                    _TTL: {"N": str(int(record.expires))},
                }
                self._client.put_item(TableName=self._table, Item=item)

    def load(self, token: str) -> JobRecord | None:
        with as_os_errors(f"table {self._table} of DynamoDB"):
            self._make_table()
            items = list(self._items(token))
        return _decode(b"".join(item[_DATA]["B"] for item in items)) if items else None

    def remove(self, token: str) -> None:
        with as_os_errors(f"table {self._table} of DynamoDB"):
            self._make_table()
            for item in list(self._items(token)):
                self._client.delete_item(TableName=self._table, Key={_ID: item[_ID], _NUMBER: item[_NUMBER]})

    def _items(self, token: str) -> Iterator[dict[str, Any]]:
        pages = self._client.get_paginator("query").paginate(
            TableName=self._table,
            KeyConditionExpression=f"{_ID} = :token",
            ExpressionAttributeValues={":token": {"S": token}},
            ConsistentRead=True,
        )
        for page in pages:
            yield from page["Items"]

    def _make_table(self) -> None:
        if self._is_made:
            return
        with contextlib.suppress(self._client.exceptions.ResourceInUseException):
            self._client.create_table(
                TableName=self._table,
                BillingMode="PAY_PER_REQUEST",
                KeySchema=[{"AttributeName": _ID, "KeyType": "HASH"}, {"AttributeName": _NUMBER, "KeyType": "RANGE"}],
                AttributeDefinitions=[
                    {"AttributeName": _ID, "AttributeType": "S"},
                    {"AttributeName": _NUMBER, "AttributeType": "N"},
                ],
            )
            self._client.get_waiter("table_exists").wait(TableName=self._table)
            self._client.update_time_to_live(
                TableName=self._table, TimeToLiveSpecification={"Enabled": True, "AttributeName": _TTL}
            )
        self._is_made = True


def _decode(data: bytes) -> JobRecord:
    try:
        return msgspec.msgpack.decode(data, type=JobRecord)
    except msgspec.DecodeError as error:
        raise OSError(f"what is stored is no answer of a job: {error}") from error


def _place(bucket: str, region: str) -> dict[str, Any]:
    other = {} if region == "us-east-1" else {"CreateBucketConfiguration": {"LocationConstraint": region}}
    return {"Bucket": bucket, **other}
