"""Measures up to how many rows one way to compute the same thing is the faster one of two.

Few rows are bound by reading weights, many by arithmetic. The faster kernel for a number of rows depends on the
processor, its memory, the number of threads and the shape of the weights. No flag of a processor says it, so the two
take turns on this machine when a model loads. What was measured is kept beside the compiled kernels: a file for each
border, so that of two workers that start at once none loses what the other one wrote. Other programs may have disturbed
it unseen: the next load measures again, until two loads in a row agree. After a week a border is measured again, for
both may have been disturbed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from handlers.cpu_kernels.compilation import kernel_files
from handlers.rolling_batch.cpu.first_compilation import compiled_kernels
from lmi_server.machine.environment import process_environment

logger = logging.getLogger(__name__)

Work = Callable[[], object]
Seconds = Callable[[Work], float]  # runs the work; returns how long it took

ROWS = (1, 4, 16, 64, 256, 1024)  # numbers of rows that are measured, until the second way is faster
MIN_GAIN = 1.15
"""How much the second way has to gain, because the first one gives a row the same bits in any batch."""
ALL = sys.maxsize  # the crossover if the first way is at least as fast with any number of rows
# Both ways have as many turns, and the fastest of each counts: the first one may compile code, and others are disturbed
# by other programs. The turns end when the difference is clear, or after some time of this thread.
_MIN_TURNS, _CLEAR_TURNS, _MAX_TURNS, _SECONDS = 3, 10, 60, 0.04
_CLEAR_GAIN = 1.5
# If the work took much longer than this thread computed, other programs had the cores. Then the threads wait for each
# other in all turns, which says nothing about the kernels.
_BUSY, _DELAY = 1.5, 0.003
_MAX_SECONDS = 3.0  # in all
_MAX_AGE = 7 * 24 * 3600.0  # seconds for which a border is kept that two loads have measured
_STEP = 4  # of ROWS: borders within one agree
_LAST_SECONDS = 0.5  # for the last of ROWS: a large layer might take longer than all else, and the head has fewer rows


def thread_seconds(work: Work) -> float:
    """Run work that OpenMP shares out; return the processor time of this thread, which computes a part of it.

    The parts are alike, and a thread that waits for another part soon sleeps. So this is about the time on an idle
    machine, and the time slices of other programs do not count.
    """
    began = time.thread_time()
    work()
    return time.thread_time() - began


class _Kept(NamedTuple):
    """A crossover as a file has it; two loads in a row have measured one that `is_confirmed`."""

    rows: int
    is_confirmed: bool


class Crossovers:
    """Up to how many rows the first of two ways is the faster one on this machine.

    It knows what files in the folder `kept` say that were confirmed, if there are any, and measures the rest.

    `machine` names everything but the shapes that the times depend on. Measuring takes little more than `max_seconds`.
    """

    def __init__(
        self,
        kept: Path | None = None,
        machine: str = "",
        seconds: Seconds = thread_seconds,
        max_seconds: float = _MAX_SECONDS,
    ) -> None:
        self._folder = kept
        self._machine = machine
        self._seconds = seconds
        self._max_seconds = max_seconds
        self._known: dict[str, int] = {}
        self._measured: dict[str, bool] = {}  # whether they confirm what a file says
        self._asked: dict[str, int | None] = {}
        self._spent = 0.0  # seconds
        self._is_busy = False  # whether other programs were seen to have the cores

    def crossover(
        self,
        name: str,
        few: Callable[[int], Work],
        many: Callable[[int], Work],
        least: int = 0,
        most: int = ALL,
        unmeasured: int = ALL,
        min_gain: float = MIN_GAIN,
    ) -> int:
        """Return the number of rows up to which `few(rows)` is the faster work, 0 if never, ALL if always.

        Up to `least` rows it is known to be the faster one, and there are never more than `most`: neither is measured.
        Equal names mean equal times. `many` is faster if it gains `min_gain`. The crossover is `unmeasured` if it
        could not be measured, because the machine is busy.
        """
        name += "" if most >= ROWS[-1] else f" for up to {most} rows"
        crossover, kept = self._known.get(name), None
        if (
            crossover is None
            and (kept := self._read(name)) is not None
            and kept.is_confirmed
            and not self._is_old(name)
        ):
            crossover = self._known[name] = kept.rows
        if crossover is None:
            began = time.perf_counter()
            end = began + self._max_seconds - self._spent
            crossover = self._measure(few, many, least, most, end, min_gain)
            self._spent += time.perf_counter() - began
            if crossover is not None:
                self._known[name] = crossover
                self._measured[name] = kept is not None and _agree(kept.rows, crossover, most)
            elif time.perf_counter() < end:
                self._is_busy = True
            if crossover is None and kept is not None:
                crossover = kept.rows
        self._asked[name] = crossover
        return unmeasured if crossover is None else crossover

    def _measure(
        self,
        few: Callable[[int], Work],
        many: Callable[[int], Work],
        least: int,
        most: int,
        end: float,
        min_gain: float,
    ) -> int | None:
        crossover, took = least, 0.0
        for rows in sorted({min(rows, most) for rows in ROWS if rows > least}):
            began = time.perf_counter()
            if rows == ROWS[-1] and (not took or rows / crossover * took > min(end - began, _LAST_SECONDS)):
                return ALL
            is_faster = _is_faster(few(rows), many(rows), self._seconds, end, min_gain)
            took = time.perf_counter() - began
            if is_faster is None:
                return None
            if not is_faster:
                between = math.isqrt(crossover * rows)
                if between > crossover and _is_faster(few(between), many(between), self._seconds, end, min_gain):
                    return between
                return crossover
            crossover = rows
        return ALL

    def keep(self) -> None:
        """Log the crossovers that were asked for since the last call, and write new ones into files.

        What was measured before other programs were seen may be wrong, and holds for this load only.
        """
        if not self._asked:
            return
        origin = "as measured before" if not self._spent else f"measured in {self._spent:.2f} s"
        if self._measured and not self._is_busy and self._folder is not None:
            origin += self._write(self._folder)
        if None in self._asked.values():
            origin += ", but for what there was no time for or other programs took the processor"
        crossovers = (f"{name}: {_in_words(crossover)}" for name, crossover in sorted(self._asked.items()))
        logger.info("Rows that the project's kernels compute, %s. %s", origin, "; ".join(crossovers))
        self._asked, self._spent, self._measured = {}, 0.0, {}

    def _write(self, folder: Path) -> str:
        """Write what was measured into its files, and return what the log says of it."""
        errors = []
        for name, is_confirmed in self._measured.items():
            try:
                kept = _Kept(self._known[name], is_confirmed)
                kernel_files.write(self._path(folder, name), self._content(name, kept))
            except OSError as error:  # such as a directory in place of one file: the others are still kept
                errors.append(str(error))
        kept_in = f", kept in {folder}" if len(errors) < len(self._measured) else ""
        return kept_in + (f", {len(errors)} of {len(self._measured)} not kept: {errors[0]}" if errors else "")

    def _path(self, folder: Path, name: str) -> Path:
        digest = hashlib.sha256(f"{self._machine}\0{name}".encode()).hexdigest()[:32]
        return folder / f"border_{digest}.json"

    def _is_old(self, name: str) -> bool:
        """Whether the border was measured so long ago that it is measured again: both loads may have been disturbed."""
        try:
            return self._folder is not None and time.time() - self._path(self._folder, name).stat().st_mtime > _MAX_AGE
        except OSError:
            return True

    def _content(self, name: str, kept: _Kept) -> bytes:
        return json.dumps({"machine": self._machine, "name": name, **kept._asdict()}).encode()

    def _read(self, name: str) -> _Kept | None:
        """Return what was measured before; None if no file says it, or if another program wrote the file."""
        if self._folder is None:
            return None
        try:
            data = kernel_files.read(self._path(self._folder, name))
            content = json.loads(data)
            kept = _Kept(content["rows"], content["is_confirmed"])
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            return None
        is_one = type(kept.rows) is int and 0 <= kept.rows <= ALL  # kernels take integers of 64 bits
        return kept if is_one and type(kept.is_confirmed) is bool and data == self._content(name, kept) else None


def _agree(one: int, other: int, most: int) -> bool:
    """Whether two crossovers are at most a step of ROWS apart; 0 is one below 1."""
    less, more = sorted(min(crossover, most, ROWS[-1]) for crossover in (one, other))
    return more < _STEP * (less + 1)


def _is_faster(few: Work, many: Work, seconds: Seconds, end: float, min_gain: float) -> bool | None:
    """Return whether `few` is the faster work; None if other programs have the cores, or `end` is reached."""
    fewest = most = math.inf
    computed, began = 0.0, time.perf_counter()
    for turn in range(1, _MAX_TURNS + 1):
        times = seconds(few), seconds(many)
        fewest, most, computed = min(fewest, times[0]), min(most, times[1]), computed + sum(times)
        if time.perf_counter() >= end:
            return None
        is_clear = not most / _CLEAR_GAIN < fewest / min_gain < most * _CLEAR_GAIN
        if (turn >= _MIN_TURNS and computed > _SECONDS) or (turn >= _CLEAR_TURNS and is_clear):
            break
    if time.perf_counter() - began > _BUSY * computed + _DELAY:
        return None
    return fewest <= min_gain * most


def _in_words(crossover: int | None) -> str:
    if crossover is None:
        return "not measured"
    return "any" if crossover == ALL else f"up to {crossover}" if crossover else "none"


def load_crossovers() -> Crossovers:
    """Return the crossovers of this machine for the number of threads that torch has now."""
    from handlers.cpu_kernels.compilation.decorators import SOURCES, target

    hidden = process_environment().get("ONEDNN_MAX_CPU_ISA", "")  # of the processor's instructions
    kind, processor, features = target()
    versions = hashlib.sha256(" ".join((kind, features, hidden, torch.__version__, SOURCES, str(ROWS))).encode())
    threads = f"{torch.get_num_threads()} threads of {os.cpu_count()}"
    return Crossovers(compiled_kernels(), f"{processor}, {threads}, {versions.hexdigest()[:16]}")
