"""Python source is parsed in several threads at once, as models register."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from paths import ROOT

from lmi_server.files.python_source import parse


@pytest.fixture
def collector_lets_other_threads_run() -> Iterator[None]:
    def pause(phase: str, info: dict[str, int]) -> None:
        time.sleep(0.0001)

    before = gc.get_threshold()
    gc.set_threshold(200, 1, 1)
    gc.callbacks.append(pause)
    yield
    gc.callbacks.remove(pause)
    gc.set_threshold(*before)


@pytest.mark.slow
@pytest.mark.usefixtures("collector_lets_other_threads_run")
def test_threads_do_not_disturb_each_other() -> None:
    source = (ROOT / "handlers/rolling_batch/engine_loading.py").read_bytes()
    with ThreadPoolExecutor(4) as threads:
        lengths = {len(tree.body) for tree in threads.map(lambda _: parse(source), range(40))}
    assert len(lengths) == 1
