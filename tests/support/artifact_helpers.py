"""A real S3 API on the loopback interface, and tiny wheels."""

from __future__ import annotations

import functools
import hashlib
import os
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from lmi_server.artifacts.progress import Activity
from lmi_server.contract.progress import Progress

BUCKET = "models"
MIB = 1 << 20


class S3:
    """A running S3 API; `variables` is the environment of its clients."""

    def __init__(self, endpoint: str, home: Path) -> None:
        import boto3

        self.variables = {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "HOME": str(home),
            "PATH": os.environ["PATH"],
        }
        self.client: Any = boto3.session.Session(
            aws_access_key_id="test", aws_secret_access_key="test", region_name="us-east-1"
        ).client("s3", endpoint_url=endpoint)
        self.client.create_bucket(Bucket=BUCKET)

    def variables_of_google(self) -> dict[str, str]:
        """Return the environment of clients that take this API for Google Cloud Storage's, which speaks the same."""
        endpoint = self.variables["AWS_ENDPOINT_URL"]
        others = {name: value for name, value in self.variables.items() if name != "AWS_ENDPOINT_URL"}
        return {**others, "STORAGE_EMULATOR_HOST": endpoint}

    def put(self, key: str, content: bytes) -> None:
        self.client.put_object(Bucket=BUCKET, Key=key, Body=content)

    def hold(self, wanted: Mapping[str, bytes]) -> None:
        """Have the bucket hold these objects and no others; those that are there already are left as they are."""
        listed = self.client.list_objects_v2(Bucket=BUCKET).get("Contents", ())
        here = {found["Key"]: found["ETag"].strip('"') for found in listed}
        for key in here.keys() - wanted.keys():
            self.client.delete_object(Bucket=BUCKET, Key=key)
        for key, content in wanted.items():
            if here.get(key) != hashlib.md5(content).hexdigest():
                self.put(key, content)

    def put_in_parts(self, key: str, path: Path, part_size: int) -> None:
        from boto3.s3.transfer import TransferConfig

        config = TransferConfig(multipart_threshold=part_size, multipart_chunksize=part_size)
        self.client.upload_file(str(path), BUCKET, key, Config=config)


@contextmanager
def s3_server(home: Path) -> Iterator[S3]:
    """Run moto's S3 on a port that the system chose."""
    from moto.server import ThreadedMotoServer

    _share_descriptions()
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    address = f"http://{host}:{port}"
    try:
        yield S3(address, home)
    finally:
        httpx.post(f"{address}/moto-api/reset")  # the next server of this process would have the objects as well
        server.stop()


def _share_descriptions() -> None:
    """Have boto3 read the description of S3 once in this process: each client would, 25 ms of a processor."""
    from botocore import session

    if not hasattr(session.create_loader, "cache_info"):
        session.create_loader = functools.cache(session.create_loader)


class Recorder(Activity):
    """An activity that keeps every report, and is cancelled by the first report that contains `cancel_at`."""

    def __init__(self, cancel_at: str | None = None) -> None:
        super().__init__()
        self.seen: list[Progress] = []
        self._cancel_at = cancel_at

    def report(self, what: str, done: int = 0, total: int | None = None) -> None:
        self.check()
        self.seen.append(Progress(what, done, total))
        if self._cancel_at is not None and self._cancel_at in what and done:
            self.cancel()


def write_wheel(directory: Path, name: str, version: str, source: str = "", requires: str = "") -> Path:
    """Write a wheel with the one module `name`."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    files = {
        f"{name}.py": source,
        f"{info}/METADATA": metadata + (f"Requires-Dist: {requires}\n" if requires else ""),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{file},,\n" for file in (*files, f"{info}/RECORD"))
    with zipfile.ZipFile(path, "w") as wheel:
        for file, content in (files | {f"{info}/RECORD": record}).items():
            wheel.writestr(file, content)
    return path
