"""Sessions on S3 (option.sessions_s3url): a worker saves them when it ends, and fetches one that it does not have.

boto3 takes credentials, region and endpoint from the places that all AWS tools read.
"""

from __future__ import annotations

import hashlib
import logging
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

_SCHEME = "s3://"


class SessionBackup:
    """Copies the sessions in `directory` to S3 and back: one object per file, `<url>/<session id>/<file>`.

    Raises ValueError if `url` is no s3://bucket/prefix. Every method raises OSError if S3 fails or boto3 is missing.
    """

    def __init__(self, url: str, directory: Path) -> None:
        bucket, _, prefix = url.removeprefix(_SCHEME).partition("/")
        if not url.startswith(_SCHEME) or not bucket:
            raise ValueError(f'sessions_s3url = "{url}" is not allowed; allowed: s3://bucket/prefix')
        self._url = url
        self._bucket = bucket
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self._directory = directory

    def save(self, session_ids: list[str]) -> None:
        """Save sessions. A file that S3 has with the same content is not sent again."""
        if not session_ids:
            return
        with self._client() as s3:
            for session_id in session_ids:
                there = dict(self._list(s3, session_id))
                for file in sorted((self._directory / session_id).iterdir()):
                    data = file.read_bytes()
                    key = self._key(session_id, file.name)
                    if there.get(key) != hashlib.md5(data, usedforsecurity=False).hexdigest():  # S3's ETag is the MD5
                        s3.put_object(Bucket=self._bucket, Key=key, Body=data)
        logger.info("saved %d sessions at %s", len(session_ids), self._url)

    def fetch(self, session_id: str) -> bool:
        """Fetch a session into `directory`; return whether S3 has it."""
        with self._client() as s3:
            keys = [key for key, _ in self._list(s3, session_id)]
            if not keys:
                return False
            with tempfile.TemporaryDirectory(prefix=".", dir=self._directory) as unfinished:
                made = Path(unfinished, session_id)
                made.mkdir(mode=0o700)
                for key in keys:
                    body = s3.get_object(Bucket=self._bucket, Key=key)["Body"].read()
                    (made / key.rpartition("/")[2]).write_bytes(body)
                try:
                    made.rename(self._directory / session_id)
                except OSError:
                    if not (self._directory / session_id).is_dir():  # another worker has fetched it meanwhile
                        raise
        return True

    def forget(self, session_id: str) -> None:
        """Delete a session from S3."""
        with self._client() as s3:
            for key, _ in self._list(s3, session_id):
                s3.delete_object(Bucket=self._bucket, Key=key)

    def _key(self, session_id: str, name: str) -> str:
        return f"{self._prefix}{session_id}/{name}"

    def _list(self, s3: Any, session_id: str) -> Iterator[tuple[str, str]]:
        """Yield the key and the ETag of each file of a session."""
        pages = s3.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=self._key(session_id, ""))
        for page in pages:
            for found in page.get("Contents", ()):
                yield found["Key"], found["ETag"].strip('"')

    @contextmanager
    def _client(self) -> Iterator[Any]:
        """Yield a client and close it: sessions are fetched and saved too rarely to keep connections open."""
        try:
            import boto3
            from botocore.exceptions import BotoCoreError, ClientError
        except ImportError as error:
            raise OSError(f'sessions_s3url needs boto3 ({error}); pip install "lmi-server[s3]"') from error
        try:
            with closing(boto3.session.Session().client("s3")) as s3:
                yield s3
        except (BotoCoreError, ClientError) as error:
            raise OSError(f"sessions at {self._url} cannot be reached: {error}") from error
