"""Measures up to how many rows one way to compute the same thing is the faster one of two.

Few rows are bound by reading weights, many by arithmetic. Which kernel is faster at which number of rows depends on the
processor, its memory, the number of threads and the shape of the weights. No flag of a processor says it, so the two
take turns on this machine when a model loads. What was measured is kept beside the compiled kernels.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from handlers.rolling_batch.first_compilation import compiled_kernels
from lmi_server.machine.environment import process_environment

_log = logging.getLogger(__name__)

Work = Callable[[], object]
Seconds = Callable[[Work], float]  # runs the work; returns how long it took

ROWS = (1, 4, 16, 64, 256)  # numbers of rows that are measured, until the second way is faster
ALL = sys.maxsize  # the border if the first way is at least as fast with any number of rows
# Rounds in which each way has a turn. The first one may compile code; of all, the fastest counts. If that leaves open
# which way is the faster one, further rounds follow, for some time.
_ROUNDS, _MOST_ROUNDS, _MOST_SECONDS = 3, 12, 0.04
# The second way has to gain this much, because the first one gives a row the same bits in any batch; and more on a busy
# machine, whose times differ by more. It is busy if the work took much longer than this thread computed.
_LEAST_GAIN, _OPEN, _BUSY = 1.15, 1.5, 2
_FILE = "measured_borders.json"


def thread_seconds(work: Work) -> float:
    """Run work that OpenMP shares out; return the processor time of this thread, which computes a part of it.

    The parts are alike, and whoever waits for another thread's part sleeps soon. So this is about the time that passes
    on an idle machine, and on a busy one the turns of other programs do not count.
    """
    began = time.thread_time()
    work()
    return time.thread_time() - began


class Borders:
    """The borders of this machine: those in the file `kept`, if there is one, and those measured from now on.

    `machine` names everything but the shapes that the times depend on.
    """

    def __init__(self, kept: Path | None = None, machine: str = "", seconds: Seconds = thread_seconds) -> None:
        self._file = kept
        self._machine = machine
        self._seconds = seconds
        self._known = _read(kept).get(machine, {})
        self._asked: dict[str, int] = {}
        self._spent = 0.0  # seconds
        self._busy = False  # whether other programs had most of the machine while something was measured

    def border(self, name: str, few: Callable[[int], Work], many: Callable[[int], Work]) -> int:
        """Return the number of rows up to which `few(rows)` is the faster work, 0 if never, ALL if always.

        Equal names mean equal times.
        """
        if name not in self._known:
            began = time.perf_counter()
            self._known[name] = self._measured(few, many)
            self._spent += time.perf_counter() - began
        self._asked[name] = self._known[name]
        return self._known[name]

    def _measured(self, few: Callable[[int], Work], many: Callable[[int], Work]) -> int:
        border = 0
        for rows in ROWS:
            if not self._is_faster(few(rows), many(rows)):
                between = round((border * rows) ** 0.5)
                return between if between > border and self._is_faster(few(between), many(between)) else border
            border = rows
        return ALL

    def _is_faster(self, few: Work, many: Work) -> bool:
        fewest = most = math.inf
        computed, began = 0.0, time.perf_counter()
        for turn in range(1, _MOST_ROUNDS + 1):
            times = self._seconds(few), self._seconds(many)
            fewest, most, computed = min(fewest, times[0]), min(most, times[1]), computed + sum(times)
            is_clear = not most / _OPEN < fewest / _LEAST_GAIN < most * _OPEN
            passed = time.perf_counter() - began
            if turn >= _ROUNDS and (is_clear or passed > _MOST_SECONDS):
                break
        is_busy = passed > _BUSY * computed + _MOST_SECONDS
        self._busy |= is_busy
        return fewest <= (_OPEN if is_busy else _LEAST_GAIN) * most

    def keep(self) -> None:
        """Log the borders that were asked for since the last call, and write new ones into the file.

        What was measured on a busy machine holds for this load only.
        """
        if not self._asked:
            return
        origin = "as measured before" if not self._spent else f"measured in {self._spent:.2f} s"
        if self._busy:
            origin += ", not kept because other programs took most of the processor"
        elif self._spent and self._file is not None:
            try:
                _write(self._file, self._machine, self._known)
                origin += f", kept in {self._file}"
            except OSError as error:
                origin += f", not kept: {error}"
        borders = (f"{name}: {_told(border)}" for name, border in sorted(self._asked.items()))
        _log.info("Rows that the project's kernels compute, %s. %s", origin, "; ".join(borders))
        self._asked, self._spent = {}, 0.0


def _told(border: int) -> str:
    return "any" if border == ALL else f"up to {border}" if border else "none"


def measured_borders() -> Borders:
    """Return the borders of this machine for the number of threads that torch has now."""
    from handlers.rolling_batch.cpu_kernels.compilation import SOURCES, target

    hidden = process_environment().get("ONEDNN_MAX_CPU_ISA", "")  # of the processor's instructions
    kind, processor, features = target()
    versions = hashlib.sha256(" ".join((kind, features, hidden, torch.__version__, SOURCES)).encode())
    threads = f"{torch.get_num_threads()} threads of {os.cpu_count()}"
    return Borders(compiled_kernels() / _FILE, f"{processor}, {threads}, {versions.hexdigest()[:16]}")


def _read(path: Path | None) -> dict[str, dict[str, int]]:
    """Return the borders by machine and name; none if there is no such file, or another program's."""
    try:
        found = json.loads(path.read_bytes()) if path is not None else {}
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {machine: borders for machine, borders in found.items() if _are_borders(borders)}


def _are_borders(found: object) -> bool:
    return isinstance(found, dict) and all(type(border) is int and border >= 0 for border in found.values())


def _write(path: Path, machine: str, borders: Mapping[str, int]) -> None:
    """Add borders to the file, which is whole at any time. Raises OSError."""
    kept = _read(path)
    kept[machine] = {**kept.get(machine, {}), **borders}
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as written:
        json.dump(kept, written)
    os.replace(written.name, path)
