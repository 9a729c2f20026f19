from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmi_server.contract.errors import ConfigurationError
from lmi_server.machine.devices import DeviceSet, plan_devices, visible_gpus


def gpus(count: int) -> tuple[str, ...]:
    return tuple(str(index) for index in range(count))


@pytest.mark.parametrize(
    ("count", "per_worker", "slices"),
    [
        (0, 1, [None]),
        (0, None, [None]),
        (1, 1, ["0"]),
        (1, None, ["0"]),
        (4, 1, ["0", "1", "2", "3"]),
        (4, 2, ["0,1", "2,3"]),
        (4, 3, ["0,1,2"]),
        (4, 4, ["0,1,2,3"]),
        (4, None, ["0,1,2,3"]),
        (8, 1, ["0", "1", "2", "3", "4", "5", "6", "7"]),
        (8, 2, ["0,1", "2,3", "4,5", "6,7"]),
        (8, 4, ["0,1,2,3", "4,5,6,7"]),
        (8, None, ["0,1,2,3,4,5,6,7"]),
    ],
)
def test_all_devices(count: int, per_worker: int | None, slices: list[str | None]) -> None:
    assert [each.visible for each in plan_devices("*", per_worker, gpus(count))] == slices


@pytest.mark.parametrize(
    ("devices", "count", "per_worker", "slices"),
    [
        ("cpu", 0, 4, [None]),
        ("-1", 4, 1, [""]),
        ("0", 4, 1, ["0"]),
        ("gpu1; 3", 4, 1, ["1", "3"]),
        ("0;2", 4, 2, ["0,1", "2,3"]),
        ("gpu0+gpu3", 4, 2, ["0,3"]),
        ("gpu4+gpu5+gpu6+gpu7", 8, None, ["4,5,6,7"]),
        ("cpu;gpu7", 8, 1, ["", "7"]),
    ],
)
def test_named_devices(devices: str, count: int, per_worker: int | None, slices: list[str | None]) -> None:
    assert [each.visible for each in plan_devices(devices, per_worker, gpus(count))] == slices


@pytest.mark.parametrize(
    ("devices", "count", "per_worker", "problem"),
    [
        ("*", 0, 4, "a worker takes 4 GPUs .* and 0 are visible"),
        ("*", 4, 8, "a worker takes 8 GPUs .* and 4 are visible"),
        ("0", 0, 1, "needs GPU 0, and 0 are visible"),
        ("3", 4, 2, "needs GPU 4, and 4 are visible"),
        ("0;1", 4, 2, "gives one device to two workers"),
        ("cpu;-1", 4, 1, "gives one device to two workers"),
        ("gpu0+gpu1", 4, 4, "names 2 GPUs, and a worker takes 4"),
        ("tpu0", 4, 1, '"tpu0" is not allowed; allowed: '),
        (";", 4, 1, "names no device"),
    ],
)
def test_what_cannot_be(devices: str, count: int, per_worker: int | None, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        plan_devices(devices, per_worker, gpus(count))


def test_the_slice_is_of_what_the_server_sees() -> None:
    sets = plan_devices("*", 2, visible_gpus({"CUDA_VISIBLE_DEVICES": "6, 3,GPU-1,7"}, installed=8))
    assert [devices.environment for devices in sets] == [
        {"CUDA_VISIBLE_DEVICES": "6,3"},
        {"CUDA_VISIBLE_DEVICES": "GPU-1,7"},
    ]
    assert [(devices.kind, devices.first) for devices in sets] == [("gpu", 0), ("gpu", 2)]


@pytest.mark.parametrize(
    ("variable", "installed", "seen"),
    [(None, 2, ("0", "1")), ("", 2, ()), ("-1", 2, ()), ("1,-1,0", 2, ("1",)), ("0,9,1", 2, ("0",)), ("0", 0, ())],
)
def test_visible_gpus(variable: str | None, installed: int, seen: tuple[str, ...]) -> None:
    environment = {} if variable is None else {"CUDA_VISIBLE_DEVICES": variable}
    assert visible_gpus(environment, installed) == seen


def test_without_devices_nothing_is_hidden() -> None:
    (cpu,) = plan_devices("*", 1, ())
    assert (cpu, cpu.environment, cpu.kind, cpu.first) == (DeviceSet(), {}, "cpu", -1)


@given(st.integers(1, 16), st.integers(1, 16))
def test_groups_share_no_gpu_and_waste_fewer_than_one_worker_takes(count: int, per_worker: int) -> None:
    if per_worker > count:
        return
    sets = plan_devices("*", per_worker, gpus(count))
    taken = [index for devices in sets for index in devices.gpus]
    assert len(taken) == len(set(taken))
    assert all(len(devices.gpus) == per_worker for devices in sets)
    assert count - len(taken) < per_worker
