"""Models on S3, fetched over HTTP from moto's implementation of its API, with each of the two clients."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from artifact_helpers import BUCKET, MIB, S3, Recorder, s3_server
from paths import TESTS

from lmi_server.artifacts.location import S3Location
from lmi_server.artifacts.progress import Activity
from lmi_server.artifacts.s3.clients import (
    Boto3,
    Download,
    OnBytes,
    S3Client,
    S3Object,
    S5cmd,
    endpoint_url,
    find_client,
    find_s5cmd,
)
from lmi_server.artifacts.s3.mirror import fetch_s3
from lmi_server.contract.errors import ArtifactError

FILES = {
    "config.json": b"{}",
    "empty": b"",
    "sub/tokenizer.json": b"t" * 1000,
    "sub/strange '*[1]? name": b"s" * 10,
    "weights-1": os.urandom(300_000),
    "weights-2": os.urandom(200_000),
}
MODEL = S3Location(BUCKET, "team/model")
WANTED = {
    **{f"team/model/{name}": content for name, content in FILES.items()},
    "team/model/folder/": b"",
    "team/model-2/config.json": b"another",
}


class Watched(S3Client):
    """A client that keeps what it was asked for; tests change what is listed, or what arrives."""

    def __init__(self, client: S3Client) -> None:
        self.downloaded: list[str] = []
        self.listed: Callable[[list[S3Object]], list[S3Object]] = lambda objects: objects
        self.arrived: Callable[[Sequence[Download]], None] = lambda downloads: None
        self._client = client

    @property
    def location(self) -> S3Location:
        return self._client.location

    @location.setter
    def location(self, location: S3Location) -> None:
        self._client.location = location

    def list_objects(self, activity: Activity) -> list[S3Object]:
        return self.listed(self._client.list_objects(activity))

    def download(self, downloads: Sequence[Download], activity: Activity, on_bytes: OnBytes, lock: int) -> None:
        self.downloaded += [download.source.key.removeprefix("team/model/") for download in downloads]
        self._client.download(downloads, activity, on_bytes, lock)
        self.arrived(downloads)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    with s3_server(tmp_path_factory.mktemp("home")) as server:
        yield server


@pytest.fixture
def s3(server: S3, monkeypatch: pytest.MonkeyPatch) -> S3:
    """Return the server with the model, and point boto3 at it, which reads the environment of this process."""
    for name, value in server.variables.items():
        monkeypatch.setenv(name, value)
    server.hold(WANTED)
    return server


def make_client(name: str, variables: dict[str, str]) -> S3Client:
    if name == "boto3":
        return Boto3(variables, MODEL)
    program = find_s5cmd(variables)
    assert program is not None
    return S5cmd(program, variables, MODEL)


@pytest.fixture(params=["s5cmd", "boto3"])
def client_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def client(client_name: str, s3: S3) -> Watched:
    return Watched(make_client(client_name, s3.variables))


def fetch(client: S3Client, root: Path, location: S3Location = MODEL, activity: Activity | None = None) -> Path:
    client.location = location
    return fetch_s3(client, root, 0, activity or Activity())


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_a_model_is_downloaded(client: Watched, tmp_path: Path) -> None:
    activity = Recorder()
    directory = fetch(client, tmp_path, activity=activity)
    assert directory.name == "model", "the name of the directory becomes the model's"
    assert contents(directory) == FILES
    seen = [progress for progress in activity.seen if progress.what == "downloading s3://models/team/model"]
    assert (seen[-1].done, seen[-1].total) == (501_012, 501_012)
    assert [progress.done for progress in seen] == sorted(progress.done for progress in seen)


def test_a_complete_copy_is_not_fetched_again(client: Watched, tmp_path: Path) -> None:
    first = fetch(client, tmp_path)
    client.downloaded.clear()
    assert fetch(client, tmp_path) == first
    assert client.downloaded == []


def test_what_changed_is_fetched_and_what_went_is_removed(client: Watched, s3: S3, tmp_path: Path) -> None:
    fetch(client, tmp_path)
    client.downloaded.clear()
    s3.put("team/model/weights-1", b"new")
    s3.client.delete_object(Bucket=BUCKET, Key="team/model/sub/tokenizer.json")
    directory = fetch(client, tmp_path)
    expected = FILES | {"weights-1": b"new"}
    del expected["sub/tokenizer.json"]
    assert contents(directory) == expected
    assert client.downloaded == ["weights-1"]


def test_a_damaged_copy_is_repaired(client: Watched, tmp_path: Path) -> None:
    directory = fetch(client, tmp_path)
    client.downloaded.clear()
    (directory / "weights-1").write_bytes(b"cut")
    assert contents(fetch(client, tmp_path)) == FILES
    assert client.downloaded == ["weights-1"]


def test_one_object_or_a_whole_bucket_may_be_named(client: Watched, s3: S3, tmp_path: Path) -> None:
    directory = fetch(client, tmp_path, S3Location(BUCKET, "team/model/sub/tokenizer.json"))
    assert contents(directory) == {"tokenizer.json": FILES["sub/tokenizer.json"]}
    directory = fetch(client, tmp_path, S3Location(BUCKET, ""))
    assert directory.name == BUCKET
    assert set(contents(directory)) == {f"team/model/{name}" for name in FILES} | {"team/model-2/config.json"}


@pytest.mark.slow
@pytest.mark.parametrize("part_size", [5 * MIB, 7 * MIB])
def test_multipart_etags_are_checked(client: Watched, s3: S3, tmp_path: Path, part_size: int) -> None:
    source = tmp_path / "source"
    source.write_bytes(os.urandom(12 * MIB))
    s3.put_in_parts("team/model/big", source, part_size)
    directory = fetch(client, tmp_path)
    assert (directory / "big").read_bytes() == source.read_bytes()
    client.downloaded.clear()
    # Emptied in the middle, as by a transfer in several parts that was cut.
    with (directory / "big").open("r+b") as file:
        file.seek(6 * MIB)
        file.write(bytes(MIB))
    s3.put("team/model/config.json", b"[]")
    directory = fetch(client, tmp_path)
    assert (directory / "big").read_bytes() == source.read_bytes()
    assert sorted(client.downloaded) == ["big", "config.json"]


# --- cuts ---


def run_fetcher(s3: S3, root: Path, cut: int = 0, limit: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TESTS / "models" / "s3_fetcher.py"), MODEL.url, str(root), str(cut), str(limit)]
    variables = s3.variables | {"PYTHONPATH": str(TESTS.parent)}
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.slow
def test_a_killed_download_is_resumed(client: Watched, s3: S3, tmp_path: Path) -> None:
    killed = run_fetcher(s3, tmp_path, cut=310_000)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    kind = tmp_path / "s3"
    (partial,) = kind.glob("*.partial")
    assert [path for path in kind.iterdir() if path.suffix not in (".partial", ".lock")] == []
    complete = {name for name, content in FILES.items() if contents(partial / "model").get(name) == content}
    assert complete
    assert contents(fetch(client, tmp_path)) == FILES
    assert {name for name in FILES if FILES[name]} - complete == set(client.downloaded)
    assert not partial.exists()


def test_what_a_cut_left_is_checked_before_it_is_used(client: Watched, tmp_path: Path) -> None:
    def cut(downloads: Sequence[Download]) -> None:
        whole, same_size, short, *rest = (download.path for download in downloads)
        same_size.write_bytes(bytes(same_size.stat().st_size))
        short.write_bytes(short.read_bytes()[:1])
        for path in rest:
            path.unlink()
        whole.with_name("leftover.tmp").touch()
        raise ArtifactError("cut")

    client.arrived = cut
    with pytest.raises(ArtifactError, match="cut"):
        fetch(client, tmp_path)
    whole = client.downloaded[0]
    client.arrived = lambda downloads: None
    client.downloaded.clear()
    assert contents(fetch(client, tmp_path)) == FILES
    assert whole not in client.downloaded
    assert len(client.downloaded) == 4


def test_a_cancelled_download_stops(client: Watched, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="cancelled"):
        fetch(client, tmp_path, activity=Recorder(cancel_at="checking the download"))
    assert not [path for path in (tmp_path / "s3").iterdir() if not path.suffix]


def test_bytes_that_arrive_wrong_are_fetched_again(client: Watched, tmp_path: Path) -> None:
    damage = iter([b"wrong" * 60_000, b"other" * 60_000])

    def damaged(downloads: Sequence[Download]) -> None:
        for download in downloads:
            if download.path.name == "weights-1":
                content = next(damage, None)
                if content is not None:
                    download.path.write_bytes(content)

    client.arrived = damaged
    assert contents(fetch(client, tmp_path)) == FILES
    assert client.downloaded.count("weights-1") == 3
    assert client.downloaded.count("weights-2") == 1


def test_bytes_that_never_arrive_right_are_refused(client: Watched, tmp_path: Path) -> None:
    def damaged(downloads: Sequence[Download]) -> None:
        for download in downloads:
            if download.path.name == "weights-1":
                download.path.write_bytes(os.urandom(300_000))

    client.arrived = damaged
    with pytest.raises(ArtifactError, match="team/model/weights-1: the download differs from what S3 lists"):
        fetch(client, tmp_path)
    assert not [path for path in (tmp_path / "s3").iterdir() if not path.suffix]


def test_etags_of_encrypted_objects_are_no_digests(
    client: Watched, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    client.listed = lambda objects: [S3Object(found.key, found.size, "0" * 32) for found in objects]
    assert contents(fetch(client, tmp_path)) == FILES
    assert "checked by size only, because their ETags are not digests" in caplog.text
    assert len(client.downloaded) == 6, "one of them twice, to find that out"


def test_two_servers_do_not_fetch_the_same_at_once(client: Watched, tmp_path: Path) -> None:
    both = threading.Barrier(2)
    activity = Recorder()

    def one(index: int) -> Path:
        both.wait()
        return fetch(client, tmp_path, activity=activity)

    with ThreadPoolExecutor(2) as executor:
        first, second = executor.map(one, range(2))
    assert first == second
    assert len(client.downloaded) == 5


# --- what goes wrong ---


def test_a_wrong_bucket(client: Watched, tmp_path: Path) -> None:
    with pytest.raises(
        ArtifactError, match=r"^s3://nowhere/model: there is no bucket nowhere at http://127.*AWS_REGION"
    ):
        fetch(client, tmp_path, S3Location("nowhere", "model"))


def test_a_wrong_prefix(client: Watched, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"^s3://models/team/mod: there are no objects; check bucket and prefix"):
        fetch(client, tmp_path, S3Location(BUCKET, "team/mod"))


def test_no_credentials(client_name: str, s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = dict(s3.variables)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        del variables[name]
        monkeypatch.delenv(name)
    with pytest.raises(ArtifactError, match=r"no AWS credentials were found; set AWS_ACCESS_KEY_ID and"):
        fetch(make_client(client_name, variables), tmp_path)


def test_an_endpoint_that_does_not_answer(
    client: Watched, client_name: str, s3: S3, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    # A closed port may be opened by another test; nothing listens on port 1.
    offline = make_client(client_name, s3.variables | {"AWS_ENDPOINT_URL": "http://127.0.0.1:1"})
    with pytest.raises(ArtifactError, match=r"http://127\.0\.0\.1:1 cannot be reached"):
        fetch(offline, tmp_path)
    directory = fetch(client, tmp_path)
    assert fetch(offline, tmp_path) == directory
    assert f"using the copy in {directory}" in caplog.text


def test_no_room(client: Watched, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"489\.3 KiB are needed and 0 bytes are left on this disk; make room"):
        fetch_s3(client, tmp_path, 1 << 60, Activity())
    assert client.downloaded == []


@pytest.mark.slow
def test_a_disk_that_gets_full(s3: S3, tmp_path: Path) -> None:
    failed = run_fetcher(s3, tmp_path, limit=100_000)
    assert failed.returncode == 1
    assert "the disk is full; make room, or set SERVING_DOWNLOAD_DIR" in failed.stderr
    assert not [path for path in (tmp_path / "s3").iterdir() if not path.suffix]


def test_a_root_that_cannot_be_written(client: Watched, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ArtifactError, match="set SERVING_DOWNLOAD_DIR to a directory that this user may write to"):
        fetch(client, tmp_path / "file")


@pytest.mark.parametrize("key", ["../evil", "a/../../evil", "a//b", "/evil", "a/./b", "a\nb"])
def test_a_key_that_is_no_path_is_refused(client: Watched, tmp_path: Path, key: str) -> None:
    client.listed = lambda objects: [*objects, S3Object(f"team/model/{key}", 1, "")]
    with pytest.raises(ArtifactError, match="its key cannot be the path of a file; rename it on S3"):
        fetch(client, tmp_path)


@pytest.mark.parametrize("kind", ["s5cmd", "boto3"])
def test_a_bucket_of_google_is_read_over_the_same_protocol(
    kind: str, s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """moto's API of S3 stands in for the one of Google Cloud Storage."""
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    variables = s3.variables_of_google()
    program = find_s5cmd(variables)
    location = S3Location(BUCKET, "team/model", "gs")
    client = Boto3(variables, location) if kind == "boto3" else S5cmd(str(program), variables, location)
    directory = fetch(client, tmp_path, location)
    assert {name: (directory / name).read_bytes() for name in FILES} == FILES
    with pytest.raises(ArtifactError, match=r"gs://no-such-bucket/x: there is no bucket no-such-bucket at http://"):
        fetch(client, tmp_path, S3Location("no-such-bucket", "x", "gs"))


def test_the_endpoint_of_google_is_its_own() -> None:
    assert endpoint_url({"AWS_ENDPOINT_URL": "http://x"}, "gs") == "https://storage.googleapis.com"
    assert endpoint_url({"STORAGE_EMULATOR_HOST": "localhost:9023"}, "gs") == "http://localhost:9023"
    assert endpoint_url({}, "s3") is None


def test_an_endpoint_that_is_no_url_is_named() -> None:
    with pytest.raises(ArtifactError, match=r"Invalid endpoint: --help; AWS_ENDPOINT_URL, or STORAGE_EMULATOR_HOST"):
        Boto3({"AWS_ENDPOINT_URL": "--help"}, MODEL).list_objects(Activity())


def test_s5cmd_is_preferred(s3: S3) -> None:
    assert isinstance(find_client(s3.variables, MODEL), S5cmd)


def test_s5cmd_without_credentials_names_the_variables(s3: S3, tmp_path: Path) -> None:
    """For a bucket at AWS, s5cmd says first that it asked for the region."""
    variables = {"PATH": s3.variables.get("PATH", os.environ["PATH"]), "AWS_EC2_METADATA_DISABLED": "true"}
    client = make_client("s5cmd", {**variables, "HOME": str(tmp_path)})
    with pytest.raises(
        ArtifactError, match="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
    ) as raised:
        fetch(client, tmp_path / "cache")
    assert "Deprecated" not in str(raised.value)
