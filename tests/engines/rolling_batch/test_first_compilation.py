"""Kernels are compiled beside the imports of a first start, for the types that models call them with."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numba
import psutil
import pytest
import torch
from paths import ROOT
from processes import children, is_running
from rolling_batch_helpers import Engine, prompts, tiles_for_any_rows
from tiny_models import CONTEXT, tiny_model
from waiting import wait_until

from handlers.checkpoints.blocks import free_cores
from handlers.checkpoints.blocks.int8_activations import round_activations
from handlers.checkpoints.blocks.quantizing import quantize_to_blocks
from handlers.cpu_kernels.compilation import kernel_files
from handlers.cpu_kernels.threads import helpers
from handlers.generation.prompts import PromptEncoder
from handlers.huggingface.options import HuggingFaceOptions
from handlers.rolling_batch.cpu import first_compilation, kernel_choice
from handlers.rolling_batch.cpu.compiling import (
    BLOCKS,
    INT8_BLOCKS,
    PLAIN,
    first_kernels,
    layer_kernels,
    token_kernels,
    whole_kernels,
)
from handlers.rolling_batch.cpu.first_compilation import FirstCompilation
from handlers.rolling_batch.runner.load_check import LoadCheck
from handlers.rolling_batch.warm_up import warm_up


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place of its own for the file that says that kernels are compiled."""
    monkeypatch.setattr(
        first_compilation, "compiled_marker", lambda element, weights, kept: tmp_path / f"{element}_{weights}_{kept}"
    )
    return tmp_path / "uint16_plain_uint16"


@pytest.mark.slow
@pytest.mark.parametrize(("element", "dtype"), [("uint16", torch.bfloat16), ("float32", torch.float32)])
@pytest.mark.parametrize(("weights", "kv_dtype"), [(PLAIN, None), (BLOCKS, None), (PLAIN, "int8"), (INT8_BLOCKS, None)])
def test_a_model_calls_the_kernels_with_the_types_that_they_are_compiled_for(
    element: str, dtype: torch.dtype, weights: str, kv_dtype: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_choice, "load_crossovers", tiles_for_any_rows)
    model = tiny_model("llama", dtype)
    if weights != PLAIN:
        quantize_to_blocks(model, "q8_0")
    if weights == INT8_BLOCKS:
        round_activations(model)
    engine = Engine(model, kv_dtype=kv_dtype, check=LoadCheck(model, CONTEXT, weights == INT8_BLOCKS))
    warm_up(engine.engine, PromptEncoder(engine.tokenizer))
    for prompt in prompts(3):
        engine.add(prompt, max_new_tokens=3)
    engine.run()
    assert helpers.start(2)
    helpers.stop()
    for kernel, arguments in (
        *first_kernels(element),
        *layer_kernels(element, weights, kv_dtype),
        *token_kernels(element),
        *whole_kernels(element, weights, kv_dtype),
    ):
        assert tuple(map(numba.typeof, arguments)) in kernel.signatures, kernel


SHARES = """
import multiprocessing, os, random, sys, time
from handlers.rolling_batch.cpu.compiling import Shared

reading, writing = os.pipe()
fork = multiprocessing.get_context("fork")

def work_of(number, seconds):
    def work():
        os.write(writing, bytes([number]))
        time.sleep(seconds)
        os.write(writing, bytes([number + 100]))
    return work

for seed in range(20):
    drawn = random.Random(seed)
    parts, others, wholes = (drawn.randrange(most) for most in (4, 4, 3))
    count = parts + others + wholes
    work = [work_of(number, drawn.choice((0, 0.001, 0.005))) for number in range(count)]
    shared = Shared(work[:parts], work[parts : parts + others], work[parts + others :])
    processes = [fork.Process(target=shared.do) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    log = os.read(reading, 1000) if count else b""
    assert sorted(log) == [*range(count), *range(100, 100 + count)], (seed, log)
    begins = [log.index(number) for number in range(parts + others, count)]
    ends = [log.index(100 + number) for number in range(parts)]
    assert not begins or not ends or min(begins) > max(ends), (seed, log)
"""


def test_processes_do_all_work_once_and_what_needs_parts_after_them() -> None:
    done = subprocess.run([sys.executable, "-c", SHARES], cwd=ROOT, capture_output=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert len(done.stdout) > 50


@pytest.mark.slow
def test_kernels_are_compiled_by_processes_at_the_first_start_only(marker: Path, tmp_path: Path) -> None:
    options = HuggingFaceOptions.model_validate({"dtype": "bf16"})
    compilation = first_compilation.start(str(tmp_path), options)
    assert compilation is not None
    compilation.wait()
    compilation.close()
    assert marker.exists()
    assert first_compilation.start(str(tmp_path), options) is None


@pytest.mark.parametrize("mask", [0, 0o002, 0o077])
def test_a_later_start_trusts_what_an_earlier_one_has_marked_under_any_umask(tmp_path: Path, mask: int) -> None:
    marker, before = tmp_path / "marker", os.umask(mask)
    try:
        marker.touch()
        marker.chmod(0o666)  # as if others had made it
        first_compilation.mark_compiled(marker)
    finally:
        os.umask(before)
    assert kernel_files.is_trusted(marker)


def test_a_process_that_fails_leaves_the_kernels_to_the_worker(
    marker: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    compilation = FirstCompilation("uint16", "plain", marker)
    compilation.wait()
    compilation.close()
    assert not marker.exists()
    assert "failed with exit code 1" in caplog.text


def test_a_load_that_fails_ends_the_processes(marker: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sleeping = tmp_path / "sleeping"
    sleeping.write_text("#!/bin/sh\nexec sleep 1000\n")
    sleeping.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(sleeping))
    compilation = FirstCompilation("uint16", "plain", marker)
    compilation.close()
    assert compilation._process.returncode is not None


@pytest.mark.parametrize(("threads", "left"), [(1, 1), (2, 1), (3, 1), (6, 4)])
def test_weights_are_packed_in_the_cores_that_compiling_leaves(
    threads: int, left: int, marker: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sleeping = tmp_path / "sleeping"
    sleeping.write_text("#!/bin/sh\nexec sleep 1000\n")
    sleeping.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(sleeping))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        compilation = FirstCompilation("uint16", "plain", marker)
        with free_cores.only_free_cores():
            assert torch.get_num_threads() == left
        assert torch.get_num_threads() == threads
        compilation.close()
        with free_cores.only_free_cores():
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
def test_both_processes_end_with_the_load(marker: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))  # it is empty, so that compiling takes seconds
    compilation = FirstCompilation("uint16", "plain", marker)
    first = compilation._process.pid
    wait_until(lambda: children(first), "the second process")
    (second,) = children(first)
    compiling = psutil.Process(second)
    wait_until(lambda: compiling.cpu_times().user > 0.2, "it compiles")
    compiling.suspend()  # so that it does not end by itself
    compilation.close()
    wait_until(lambda: not is_running(second), "the end of the second process")


@pytest.mark.parametrize(
    ("dtype", "config", "element"),
    [
        ("bf16", None, "uint16"),
        ("fp32", None, "float32"),
        ("fp16", None, None),
        ("auto", {"dtype": "bfloat16"}, "uint16"),
        ("auto", {"torch_dtype": "float32"}, "float32"),
        ("auto", {"dtype": "float16"}, None),
        ("auto", {}, None),
        ("auto", [], None),
        ("auto", None, None),
    ],
)
def test_the_type_of_elements_is_that_of_the_model(
    dtype: str, config: object, element: str | None, tmp_path: Path
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    assert first_compilation._element(tmp_path, HuggingFaceOptions.model_validate({"dtype": dtype})) == element


@pytest.mark.parametrize(
    ("quantize", "declared", "weights"),
    [
        (None, None, PLAIN),
        (None, {"quant_method": "gptq"}, BLOCKS),
        (None, {"quant_method": "awq"}, BLOCKS),
        (None, {"quant_method": "blocks"}, BLOCKS),
        (None, {"quant_method": "compressed-tensors", "format": "pack-quantized"}, BLOCKS),
        (None, {"quant_method": "compressed-tensors", "format": "float-quantized"}, PLAIN),
        (None, {"quant_method": "fp8"}, PLAIN),
        (None, {"quant_method": ["gptq"]}, PLAIN),
        (None, ["gptq"], PLAIN),
        ("bitsandbytes4", None, BLOCKS),
        ("q4_0", None, BLOCKS),
    ],
)
def test_packed_weights_are_computed_as_blocks(
    quantize: str | None, declared: object, weights: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": declared}))
    for activations, expected in (("auto", weights), ("int8", INT8_BLOCKS if weights == BLOCKS else weights)):
        given = {"dtype": "bf16", "quantize": quantize, "activation_dtype": activations}
        assert first_compilation._weights(tmp_path, HuggingFaceOptions.model_validate(given)) == expected
