"""Which kernel computes how many rows follows from what was measured, and the results are right whichever it is."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rolling_batch_helpers import Engine, check_log_probabilities, prompts
from tiny_models import CONTEXT, tiny_model
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from handlers.rolling_batch.cpu import kernel_choice
from handlers.rolling_batch.cpu.kernel_choice import ALL, Crossovers, Seconds, Work
from handlers.rolling_batch.cpu.linears import PackedLinear, TiledLinear, lay_out_linears, reads_tiles
from handlers.rolling_batch.fused.decoder_layers import FusedDecoderLayer
from handlers.rolling_batch.runner.model_runner import ModelRunner

_needs_onednn = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN multiplies no bfloat16 here"
)
# On processors with AVX-512, but without its products in bfloat16, oneDNN has other kernels.
_needs_shared_weights = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported() or not reads_tiles(nn.Linear(64, 128, dtype=torch.bfloat16)),
    reason="oneDNN lays weights out in another way here",
)
Times = Callable[[type[nn.Module], int], float]


def patient(*arguments: Any, **named: Any) -> Crossovers:
    """Return crossovers for which there is time to measure, however busy the machine is."""
    return Crossovers(*arguments, **named, max_seconds=math.inf)


def few(rows: int) -> Work:
    return lambda: ("few", rows)


def many(rows: int) -> Work:
    return lambda: ("many", rows)


def costing(few_seconds: Callable[[int], float], many_seconds: Callable[[int], float]) -> Callable[[Work], float]:
    def seconds(work: Work) -> float:
        kind, rows = work()  # type: ignore[misc]
        return few_seconds(rows) if kind == "few" else many_seconds(rows)

    return seconds


@pytest.mark.parametrize(
    ("few_seconds", "crossover"),
    [
        (lambda rows: rows, 4),
        (lambda rows: rows / 2, 8),
        (lambda rows: rows / 3, 16),
        (lambda rows: rows / 40, 128),
        (lambda rows: 9.0, 0),
        (lambda rows: 1.0, ALL),
        (lambda rows: 5.0, ALL),
        (lambda rows: 5.5, ALL),  # a gain of a tenth is none
    ],
)
def test_the_crossover_is_where_the_second_way_becomes_faster(
    few_seconds: Callable[[int], float], crossover: int
) -> None:
    assert patient(seconds=costing(few_seconds, lambda rows: 5.0)).crossover("x", few, many) == crossover


def test_the_time_that_other_programs_take_moves_no_crossover() -> None:
    delays = iter([100.0, 0.0, 0.0, 0.0, 0.0, 0.0, 30.0, 90.0] * 99)
    clean = costing(lambda rows: rows / 2, lambda rows: 5.0)
    assert patient(seconds=lambda work: clean(work) + next(delays)).crossover("x", few, many) == 8


def test_a_crossover_is_measured_by_two_loads_of_each_machine(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", kernel_choice.__name__)
    measured: list[object] = []

    def seconds(work: Work) -> float:
        measured.append(work())
        return costing(lambda rows: rows, lambda rows: 5.0)(work)

    starts = [("a", "xy", True), ("a", "xz", True), ("b", "x", True), ("a", "x", False), ("a", "xyz", True)]
    for machine, names, is_new in (*starts, ("a", "xyz", False)):
        crossovers = patient(tmp_path, machine, seconds)
        assert [crossovers.crossover(name, few, many) for name in names] == [4] * len(names)
        crossovers.keep()
        assert bool(measured) is is_new
        assert ("as measured before" in caplog.messages[-1]) is not is_new
        measured.clear()
    assert "x: up to 4" in caplog.messages[-1]
    assert len(list(tmp_path.iterdir())) == 4  # x, y and z of one machine, x of the other


def test_of_two_workers_that_start_at_once_none_loses_what_the_other_one_measured(tmp_path: Path) -> None:
    timer = costing(lambda rows: rows, lambda rows: 5.0)
    workers = [patient(tmp_path, "a", timer) for _ in range(2)]
    for worker, name in zip(workers, "xy", strict=True):
        assert worker.crossover(name, few, many) == 4
    for worker in workers:
        worker.keep()
    for seconds in (timer, lambda work: pytest.fail("it is measured again")):
        later = patient(tmp_path, "a", seconds)
        assert [later.crossover(name, few, many) for name in "xy"] == [4, 4]
        later.keep()


def test_a_crossover_that_a_load_measured_wrong_is_replaced_by_one_that_two_loads_in_a_row_measure(
    tmp_path: Path,
) -> None:
    for factor, expected in ((9.0, 0), (1.0, 4), (1 / 64, 256), (1 / 40, 128)):
        crossovers = patient(tmp_path, "a", costing(lambda rows, factor=factor: factor * rows, lambda rows: 5.0))
        assert crossovers.crossover("x", few, many) == expected
        crossovers.keep()
    last = patient(tmp_path, "a", lambda work: pytest.fail("it is measured again"))
    assert last.crossover("x", few, many) == 128


@pytest.mark.parametrize(
    ("first", "second", "most", "agree"),
    [(0, 1, ALL, True), (0, 4, ALL, False), (4, 16, ALL, True), (4, 32, ALL, False), (64, ALL, ALL, False),
     (64, ALL, 128, True), (256, ALL, ALL, True)],
)  # fmt: skip
def test_two_loads_agree_if_their_crossovers_are_a_step_of_rows_apart(
    first: int, second: int, most: int, agree: bool, tmp_path: Path
) -> None:
    measured: list[object] = []
    for crossover in (first, second, second):
        timer = costing(lambda rows, crossover=crossover: 1.0 if rows <= crossover else 9.0, lambda rows: 5.0)
        measured.clear()
        crossovers = patient(tmp_path, "a", lambda work, timer=timer: measured.append(work()) or timer(work))
        crossovers.crossover("x", few, many, most=most)
        crossovers.keep()
    assert bool(measured) is not agree


def test_a_busy_machine_takes_what_one_load_has_measured(tmp_path: Path) -> None:
    def busy(work: Work) -> float:
        time.sleep(0.01)
        return 1e-6

    first = patient(tmp_path, "a", costing(lambda rows: rows, lambda rows: 5.0))
    first.crossover("x", few, many)
    first.keep()
    assert patient(tmp_path, "a", busy).crossover("x", few, many) == 4


def test_what_a_busy_machine_would_measure_is_left_to_the_next_load(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each turn takes a long time, of which the thread computes a little."""
    caplog.set_level("INFO", kernel_choice.__name__)
    timer = costing(lambda rows: 1e-6 * rows, lambda rows: 5e-6)

    def seconds(work: Work) -> float:
        time.sleep(0.01)
        return timer(work)

    crossovers = patient(tmp_path, "a", seconds)
    assert crossovers.crossover("x", few, many) == ALL
    crossovers.keep()
    assert "x: not measured" in caplog.messages[-1]
    assert "other programs took the processor" in caplog.messages[-1]
    assert patient(tmp_path, "a", lambda work: 1e6 * timer(work)).crossover("x", few, many) == 4


def test_what_was_measured_before_the_machine_was_seen_busy_is_not_kept(tmp_path: Path) -> None:
    timer = costing(lambda rows: 1e-6 * rows, lambda rows: 5e-6)
    is_busy = False

    def seconds(work: Work) -> float:
        time.sleep(0.01 * is_busy)
        return timer(work) * (1 if is_busy else 1e6)

    crossovers = patient(tmp_path, "a", seconds)
    assert crossovers.crossover("x", few, many) == 4
    is_busy = True
    assert crossovers.crossover("y", few, many) == ALL
    crossovers.keep()
    assert not list(tmp_path.iterdir())


def test_what_there_was_no_time_to_measure_is_not_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", kernel_choice.__name__)
    timer = costing(lambda rows: rows, lambda rows: 5.0)
    crossovers = Crossovers(tmp_path, "a", timer, max_seconds=0)
    assert crossovers.crossover("x", few, many) == ALL
    assert crossovers.crossover("y", few, many, unmeasured=3) == 3
    crossovers.keep()
    assert "x: not measured" in caplog.messages[-1]
    assert patient(tmp_path, "a", timer).crossover("x", few, many) == 4


@pytest.mark.parametrize(
    "content", ["", "[]", '{"rows": 1}', '{"rows": "4"}', '{"rows": -1}', '{"rows": true}', "\0", "[" * 99_999]
)
def test_a_damaged_file_is_measured_anew(tmp_path: Path, content: str) -> None:
    timer = costing(lambda rows: rows, lambda rows: 5.0)
    first = patient(tmp_path, "a", timer)
    first.crossover("x", few, many)
    first.keep()
    (kept,) = tmp_path.iterdir()
    kept.write_text(content)
    for seconds in (timer, timer, lambda work: pytest.fail("it is measured again")):
        crossovers = patient(tmp_path, "a", seconds)
        assert crossovers.crossover("x", few, many) == 4
        crossovers.keep()


def test_a_border_that_no_kernel_takes_is_measured_anew(tmp_path: Path) -> None:
    timer = costing(lambda rows: rows, lambda rows: 5.0)
    first = patient(tmp_path, "a", timer)
    first.crossover("x", few, many)
    first.keep()
    (kept,) = tmp_path.iterdir()
    kept.write_text(kept.read_text().replace('"rows": 4', f'"rows": {10**30}'))
    assert str(10**30) in kept.read_text()
    assert patient(tmp_path, "a", timer).crossover("x", few, many) == 4


def test_the_file_of_another_border_says_nothing(tmp_path: Path) -> None:
    kept = []
    for name, seconds in (("x", 1.0), ("y", 9.0)):
        for _ in range(2):
            crossovers = patient(tmp_path, "a", costing(lambda rows, seconds=seconds: seconds, lambda rows: 5.0))
            crossovers.crossover(name, few, many)
            crossovers.keep()
        kept += [path for path in tmp_path.iterdir() if path not in kept]
    kept[0].write_bytes(kept[1].read_bytes())
    timer = costing(lambda rows: rows, lambda rows: 5.0)
    assert [patient(tmp_path, "a", timer).crossover(name, few, many) for name in "xy"] == [4, 0]


def test_a_file_that_cannot_be_written_is_named_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", kernel_choice.__name__)
    crossovers = patient(tmp_path / "missing", "a", costing(lambda rows: 1.0, lambda rows: 5.0))
    assert crossovers.crossover("x", few, many) == ALL
    crossovers.keep()
    assert "not kept" in caplog.messages[-1]
    assert "missing" in caplog.messages[-1]


def test_a_directory_in_place_of_one_file_keeps_no_other_border_from_its_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", kernel_choice.__name__)
    timer = costing(lambda rows: rows, lambda rows: 5.0)
    first = patient(tmp_path, "a", timer)
    first.crossover("x", few, many)
    first.keep()
    (file,) = tmp_path.iterdir()
    file.unlink()
    (file / "in the way").mkdir(parents=True)
    for _ in range(2):
        crossovers = patient(tmp_path, "a", timer)
        assert [crossovers.crossover(name, few, many) for name in "xyz"] == [4, 4, 4]
        crossovers.keep()
        assert f", kept in {tmp_path}, 1 of 3 not kept: " in caplog.messages[-1]
    last = patient(tmp_path, "a", lambda work: pytest.fail("it is measured again"))
    assert [last.crossover(name, few, many) for name in "yz"] == [4, 4]


def test_a_border_that_two_disturbed_loads_have_confirmed_holds_for_a_week(tmp_path: Path) -> None:
    disturbed = costing(lambda rows: 9.0 * rows, lambda rows: 5.0)
    clean = costing(lambda rows: rows, lambda rows: 5.0)

    def load(seconds: Seconds) -> int:
        crossovers = patient(tmp_path, "a", seconds)
        found = crossovers.crossover("x", few, many)
        crossovers.keep()
        return found

    def age(days: float) -> None:
        (file,) = tmp_path.iterdir()
        os.utime(file, (time.time() - days * 24 * 3600,) * 2)

    assert [load(disturbed), load(disturbed), load(clean)] == [0, 0, 0]
    age(6.9)
    assert load(clean) == 0
    age(7.1)
    assert [load(clean), load(clean), load(disturbed)] == [4, 4, 4], "two clean loads have confirmed it"
    age(7.1)
    assert [load(disturbed), load(clean), load(clean), load(disturbed)] == [0, 4, 4, 4], "one disturbed look is mended"


@pytest.mark.parametrize(("per_second", "max_seconds"), [(13_000, 0.55), (8000, math.inf)])
def test_rows_that_would_take_too_long_are_not_measured(
    per_second: int, max_seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock goes on by what is measured alone."""
    asked: list[int] = []
    now = 0.0
    monkeypatch.setattr(kernel_choice, "time", SimpleNamespace(perf_counter=lambda: now))

    def seconds(work: Work) -> float:
        nonlocal now
        _, rows = work()  # type: ignore[misc]
        asked.append(rows)
        now += rows / per_second
        return float(rows)

    assert Crossovers(seconds=seconds, max_seconds=max_seconds).crossover("slow", few, many) == ALL
    assert max(asked) == 256


@pytest.mark.parametrize(("few_seconds", "crossover"), [(lambda rows: 1.0, ALL), (lambda rows: rows / 5, 25)])
def test_more_rows_than_there_can_be_are_not_measured(few_seconds: Callable[[int], float], crossover: int) -> None:
    timer, asked = costing(few_seconds, lambda rows: 5.0), set()

    def seconds(work: Work) -> float:
        asked.add(work()[1])  # type: ignore[index]
        return timer(work)

    crossovers = patient(seconds=seconds)
    assert crossovers.crossover("x", few, many, least=16, most=40) == crossover
    assert {16 < rows <= 40 for rows in asked} == {True}
    assert crossovers.crossover("x", few, many) != crossover or crossover == ALL  # another question
    assert max(asked) > 40


def test_this_machine_has_a_name_and_files_beside_the_compiled_kernels() -> None:
    crossovers = kernel_choice.load_crossovers()
    assert crossovers._folder is not None
    assert crossovers._folder.is_dir()
    assert f"{torch.get_num_threads()} threads" in crossovers._machine


class ModuleTimer:
    """Takes the sum of `seconds` of the modules that the work calls, by their class and their number of rows.

    Modules may take less than no time, so that what calls them is faster than what does not. The sum is positive.
    """

    def __init__(self, seconds: Times) -> None:
        self._seconds = seconds
        self._sum = 0.0

    def __call__(self, work: Work) -> float:
        self._sum = 0.0
        hook = register_module_forward_pre_hook(self._add)
        work()
        hook.remove()
        return max(self._sum, 1e5)

    def _add(self, module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if inputs:
            self._sum += self._seconds(type(module), inputs[0].shape[:-1].numel())


def tiles_up_to(crossover: int) -> Times:
    """Return times with which tiles are the faster linear layers up to `crossover` rows.

    They are longer than any test takes, so that the machine does not look busy.
    """

    def seconds(kind: type[nn.Module], rows: int) -> float:
        if kind is TiledLinear:
            return 1e6 if rows <= crossover else 9e6
        return 3e6 if kind is PackedLinear else 0.0

    return seconds


@_needs_onednn
@pytest.mark.parametrize("crossover", [0, 8, 64, ALL])
@pytest.mark.parametrize(
    ("inputs", "outputs", "bias"), [(64, 128, False), (96, 130, True), (100, 200, True), (3, 5, True)]
)
def test_a_linear_layer_is_computed_as_was_measured_and_right(
    crossover: int, inputs: int, outputs: int, bias: bool
) -> None:
    chance = torch.Generator().manual_seed(inputs)
    plain = [nn.Linear(inputs, outputs, bias=bias, dtype=torch.bfloat16) for _ in range(2)]
    for linear in plain:
        nn.init.normal_(linear.weight, generator=chance)
    model = nn.Sequential(*plain)
    assert lay_out_linears(model, patient(seconds=ModuleTimer(tiles_up_to(crossover)))) == 2
    for linear, laid in zip(plain, model, strict=True):
        if inputs == 3:  # words of the tiles hold two inputs
            assert type(laid) is PackedLinear
        elif type(laid) is TiledLinear:
            assert laid.max_rows in {crossover, ALL}
            assert crossover > 8 or laid.max_rows == crossover
        else:  # oneDNN lays this shape out in another way, and only one copy is kept
            assert crossover <= 8
        for rows in (1, 8, 9, 64, 65, 300):
            hidden = torch.randn((1, rows, inputs), generator=chance).bfloat16()
            expected = linear.double()(hidden.double())
            linear.bfloat16()
            torch.testing.assert_close(laid(hidden).double(), expected, rtol=2**-7, atol=inputs**0.5 * 1e-2)


@_needs_shared_weights
def test_shapes_are_measured_apart() -> None:
    model = nn.Sequential(nn.Linear(64, 128, dtype=torch.bfloat16), nn.Linear(128, 64, dtype=torch.bfloat16))
    crossovers = Crossovers()
    crossovers._known = {"64 x 128 and bias": 16, "128 x 64 and bias": 1}
    lay_out_linears(model, crossovers)
    assert [layer.max_rows for layer in model] == [16, 1]


@pytest.fixture
def timer(monkeypatch: pytest.MonkeyPatch) -> Callable[[Times], None]:
    """Return a function that sets the times of modules for all models that are loaded in the test."""

    def use(seconds: Times) -> None:
        monkeypatch.setattr(kernel_choice, "load_crossovers", lambda: patient(seconds=ModuleTimer(seconds)))

    return use


@_needs_shared_weights
@pytest.mark.slow
@pytest.mark.parametrize("crossover", [0, 1, 4, 16])
def test_answers_are_near_those_of_float32_wherever_the_crossover_is(
    crossover: int, timer: Callable[[Times], None]
) -> None:
    """Requests join and leave, so that steps have more rows than the crossover, and fewer."""
    timer(tiles_up_to(crossover))
    engine, exact = Engine(tiny_model("llama", torch.bfloat16)), tiny_model("llama")
    kinds = {module.max_rows for module in engine.model.modules() if isinstance(module, TiledLinear)}
    assert kinds == {crossover}
    assert engine.runner._eager.unpadded_rows == crossover
    asked = [
        (prompt, engine.add(prompt, max_new_tokens=3 * number + 1, logprobs=0, ignore_eos=True)[1])
        for number, prompt in enumerate(prompts(9))
    ]
    engine.run()
    check_log_probabilities(exact, asked)


@_needs_shared_weights
@pytest.mark.slow
@pytest.mark.parametrize(
    ("tiles", "crossover", "max_rows"), [(0, 0, None), (0, 4, 4), (4, 0, 4), (4, 16, 16), (4, ALL, ALL)]
)
def test_one_call_computes_all_layers_up_to_where_it_was_the_faster_way(
    tiles: int, crossover: int, max_rows: int | None, timer: Callable[[Times], None]
) -> None:
    """Only the layers one by one call modules for layers, which gain or lose time in this test.

    Up to as many rows as the kernel computes in all linear layers, the call is faster without a measurement.
    """
    of_linears = tiles_up_to(tiles)

    def seconds(kind: type[nn.Module], rows: int) -> float:
        if kind is FusedDecoderLayer:
            return 1e9 if rows <= crossover else -1e9
        return of_linears(kind, rows)

    timer(seconds)
    runner = ModelRunner(tiny_model("llama", torch.bfloat16), CONTEXT)
    runner.prepare(4, CONTEXT)
    assert (None if runner._eager.decoder is None else runner._eager.decoder.max_rows) == max_rows
    assert runner.fused["models"] == int(max_rows is not None)


@_needs_shared_weights
@pytest.mark.slow
def test_the_call_for_all_layers_is_not_measured_for_more_rows_than_a_step_can_decode(
    timer: Callable[[Times], None],
) -> None:
    measured: list[int] = []
    of_linears = tiles_up_to(16)

    def seconds(kind: type[nn.Module], rows: int) -> float:
        if kind is FusedDecoderLayer:
            measured.append(rows)
        return of_linears(kind, rows)

    timer(seconds)
    for decode_rows in (12, 24):
        runner = ModelRunner(tiny_model("llama", torch.bfloat16), CONTEXT)
        runner.prepare(4, CONTEXT, decode_rows)
        assert runner._eager.decoder is not None
        assert max(measured, default=0) == (0 if decode_rows == 12 else 24)
