"""The recorded answers of DJL Serving 0.36 against this server, which serves the same models.

tests/data/djl_serving/ has the recordings, the models and, in differences.txt, what differs on purpose. A difference
that is not listed fails a test, and so does a listed one that has become the same.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby

import pytest
from paths import DATA
from recordings import Recording, read_expected, read_recordings, replay
from server_helpers import running

RECORDINGS = DATA / "djl_serving"
FILES = ("http", "model", "modes")
EXPECTED = read_expected(RECORDINGS / "differences.txt")


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    """Serve a copy of the recorded models, which write into their directories."""
    store = tmp_path_factory.mktemp("djl_serving") / "models"
    shutil.copytree(RECORDINGS / "models", store)
    for model in store.iterdir():
        if len(list(model.iterdir())) == 1:  # only its properties differ from those of "probe"
            shutil.copy(store / "probe" / "model.py", model)
    with running("--model-store", store, workers=len(list(store.iterdir()))) as server:
        yield "127.0.0.1", server.port


@pytest.fixture(scope="module")
def differences(address: tuple[str, int]) -> dict[str, dict[str, list[str]]]:
    """Return what differs, by file and name of the recording."""
    files = {file: read_recordings(RECORDINGS / f"{file}.jsonl") for file in FILES}
    found = {"http": replay(address, files["http"])}  # alone, because it asks for the health of all models
    with ThreadPoolExecutor() as threads:
        model = threads.submit(replay, address, files["model"])
        modes = [threads.submit(replay, address, group) for group in by_model(files["modes"])]
        found["model"] = model.result()
        found["modes"] = {name: lines for part in modes for name, lines in part.result().items()}
    return found


def by_model(recordings: list[Recording]) -> list[list[Recording]]:
    """Return the recordings of each model: models do not disturb each other, so that all may be asked at once."""

    def model(recording: Recording) -> str:
        found = re.match(r"POST /predictions/(\w+)", str(recording.send[0]))
        assert found is not None
        return found[1]

    return [list(group) for _, group in groupby(recordings, key=model)]


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
def test_answers_are_those_of_djl_serving(file: str, differences: dict[str, dict[str, list[str]]]) -> None:
    assert {name: lines for name, lines in differences[file].items() if lines and name not in EXPECTED} == {}


@pytest.mark.slow
def test_listed_differences_are_differences(differences: dict[str, dict[str, list[str]]]) -> None:
    found = {name for file in differences.values() for name, lines in file.items() if lines}
    assert sorted(EXPECTED.keys() - found) == []


def test_few_differences_are_listed_each_with_a_reason() -> None:
    assert [name for name, reason in EXPECTED.items() if not reason] == []
    assert len(EXPECTED) <= 62
