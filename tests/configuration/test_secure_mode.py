"""SageMaker's secure mode: each control, the allowed keys, the untrusted channels, and the variables themselves."""

from __future__ import annotations

import json
import pickle
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lmi_server.commands.cli import app
from lmi_server.configuration.checks.secure_mode import CONTROLS, secure_mode
from lmi_server.configuration.resolve import inspect_model
from lmi_server.contract.errors import ConfigurationError

ALL = ",".join(CONTROLS)
LLAMA = json.dumps({"architectures": ["LlamaForCausalLM"]})
SAFE = {"config.json": LLAMA, "model.safetensors": "", "serving.properties": "option.rolling_batch=auto"}
TEMPLATE = json.dumps({"chat_template": "{{ messages }}"})


def make(directory: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return directory


def problems(directory: Path, controls: str = ALL, **more: str) -> list[str]:
    environment = {"SAGEMAKER_SECURE_MODE": "true", "SAGEMAKER_SECURITY_CONTROLS": controls, **more}
    return list(inspect_model(directory, environment).problems)


def refused(directory: Path, *words: str, controls: str = ALL, **more: str) -> None:
    """Check that there is one problem, which has these words and says that it comes from secure mode."""
    found = problems(directory, controls, **more)
    assert len(found) == 1, found
    assert all(word in found[0] for word in ("secure mode", *words)), found[0]


def test_a_model_of_safetensors_is_served_under_every_control(tmp_path: Path) -> None:
    keys = "engine=Python\noption.entryPoint=djl_python.huggingface\noption.trust_remote_code=false\nminWorkers=1\n"
    keys += "option.dtype=fp16\noption.enable_lora=true\noption.pythonExecutable=/usr/bin/python3"
    files = {"tokenizer_config.json": '{"bos_token": "a"}', "adapters/one/adapter_model.safetensors": ""}
    assert problems(make(tmp_path, {**SAFE, **files, "serving.properties": keys})) == []


@pytest.mark.parametrize(
    ("control", "files", "words"),
    [
        ("DISALLOW_TRUST_REMOTE_CODE", {"serving.properties": "option.trust_remote_code=true"}, ["trust_remote_code"]),
        ("DISALLOW_TRUST_REMOTE_CODE", {"serving.properties": "option.trust_remote_code=on"}, ["trust_remote_code"]),
        ("DISALLOW_CUSTOM_INFERENCE_SCRIPTS", {"model.py": ""}, ["model.py", "remove the file"]),
        (
            "DISALLOW_CUSTOM_INFERENCE_SCRIPTS",
            {"model.py": "", "serving.properties": "option.entryPoint=djl_python.huggingface"},
            ["model.py"],
        ),
        ("DISALLOW_CUSTOM_INFERENCE_SCRIPTS", {"adapters/one/model.py": ""}, ["adapters/one/model.py"]),
        (
            "DISALLOW_CUSTOM_INFERENCE_SCRIPTS",
            {"djl_python.own.py": "", "serving.properties": "option.entryPoint=djl_python.own.py"},
            ["option.entryPoint"],
        ),
        ("DISALLOW_REQUIREMENTS_TXT", {"requirements.txt": "torch"}, ["requirements.txt"]),
        ("DISALLOW_REQUIREMENTS_TXT", {"adapters/one/requirements.txt": ""}, ["adapters/one/requirements.txt"]),
        *(
            ("DISALLOW_PICKLE_FILES", {name: ""}, [name])
            for name in (
                "pytorch_model.bin",
                "a.pt",
                "a.pth",
                "a.ckpt",
                "a.pkl",
                "a.PKL",
                "deep/below/a.bin",
                "a.pickle",
                "a.joblib",
                "adapter.bin",
            )
        ),
        ("DISALLOW_PICKLE_FILES", {"serving.properties": "option.load_format=pt"}, ["option.load_format"]),
        (
            "DISALLOW_PICKLE_FILES",
            {"serving.properties": "option.rolling_batch=lmi-dist\noption.speculative_draft_model=a/b"},
            ["speculative_draft_model"],
        ),
        ("DISALLOW_CHAT_TEMPLATE", {"tokenizer_config.json": TEMPLATE}, ["tokenizer_config.json"]),
        ("DISALLOW_CHAT_TEMPLATE", {"tokenizer_config.json": "cut {"}, ["tokenizer_config.json"]),
        ("DISALLOW_CHAT_TEMPLATE", {"chat_template.jinja": ""}, ["chat_template.jinja"]),
        ("DISALLOW_CHAT_TEMPLATE", {"chat_template.json": TEMPLATE}, ["chat_template.json"]),
        ("DISALLOW_CHAT_TEMPLATE", {"special_tokens_map.json": TEMPLATE}, ["special_tokens_map.json"]),
        ("DISALLOW_CHAT_TEMPLATE", {"special_tokens_map.json": "cut {"}, ["special_tokens_map.json"]),
        ("DISALLOW_CHAT_TEMPLATE", {"other.json": '{"chat\\u005ftemplate": "a"}'}, ["other.json"]),
    ],
)
def test_a_control_refuses_what_it_names_and_another_control_does_not(
    tmp_path: Path, control: str, files: dict[str, str], words: list[str]
) -> None:
    directory = make(tmp_path, {**SAFE, **files})
    refused(directory, *words, control, controls=control)
    refused(directory, *words, controls=ALL)
    other = next(name for name in CONTROLS if name != control)
    assert problems(directory, other) == []
    assert inspect_model(directory, {}).problems == ()


def test_a_pickle_is_found_by_what_it_holds(tmp_path: Path) -> None:
    directory = make(tmp_path, SAFE)
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        (directory / "weights.dat").write_bytes(pickle.dumps({"a": 1}, protocol))
        refused(directory, "weights.dat", "DISALLOW_PICKLE_FILES")
    with zipfile.ZipFile(directory / "weights.dat", "w") as archive:
        archive.writestr("weights/data.pkl", b"")
    refused(directory, "weights.dat", "DISALLOW_PICKLE_FILES")
    with zipfile.ZipFile(directory / "weights.dat", "w") as archive:
        archive.writestr("schema.json", b"{}")
    assert problems(directory) == []


def test_a_length_in_front_of_safetensors_is_no_pickle(tmp_path: Path) -> None:
    directory = make(tmp_path, SAFE)
    (directory / "model-2.safetensors").write_bytes(struct.pack("<Q", 0x0280) + b"{}".ljust(0x0280))
    assert problems(directory) == []


def test_a_chat_template_in_the_header_of_a_gguf_file_is_one(tmp_path: Path) -> None:
    for key, found in ((b"general.name", False), (b"tokenizer.chat_template.tool_use", True)):
        header = b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, len(key)) + key + struct.pack("<IQ", 8, 1) + b"x"
        (tmp_path / "channel").mkdir(exist_ok=True)
        (tmp_path / "channel" / "a.gguf").write_bytes(header)
        mode = secure_mode({"SAGEMAKER_SECURE_MODE": "true", "SAGEMAKER_SECURITY_CONTROLS": "DISALLOW_CHAT_TEMPLATE"})
        assert mode is not None
        assert bool(list(mode.file_problems([tmp_path / "channel"]))) is found
    (tmp_path / "channel" / "a.gguf").write_bytes(b"GGUF cut")
    assert list(mode.file_problems([tmp_path / "channel"]))


def gguf_with_template(path: Path) -> Path:
    key = b"tokenizer.chat_template"
    header = b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, len(key)) + key + struct.pack("<IQ", 8, 1) + b"x"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(header)
    return path


@pytest.mark.parametrize("place", ["elsewhere/a.gguf", "model/a.gguf"])
def test_a_gguf_file_that_model_id_names_is_searched(tmp_path: Path, place: str) -> None:
    named = gguf_with_template(tmp_path / place)
    directory = make(tmp_path / "model", {"serving.properties": f"option.model_id={named}"})
    with_control, without = (
        [line for line in problems(directory, control) if "secure mode" in line]
        for control in ("DISALLOW_CHAT_TEMPLATE", "DISALLOW_PICKLE_FILES")
    )
    assert [line.partition(" ")[0] for line in with_control] == [str(named)], with_control
    assert without == []


def test_a_fetched_gguf_file_is_searched_with_what_is_read_beside_it(tmp_path: Path) -> None:
    mode = secure_mode({"SAGEMAKER_SECURE_MODE": "true", "SAGEMAKER_SECURITY_CONTROLS": "DISALLOW_CHAT_TEMPLATE"})
    assert mode is not None
    named = gguf_with_template(tmp_path / "fetched" / "a.gguf")
    others = {"chat_template.jinja": "", "tokenizer_config.json": TEMPLATE, "additional_chat_templates/a.jinja": ""}
    make(tmp_path / "fetched", {**others, "another_model/chat_template.jinja": ""})
    found = [line.partition(" ")[0] for line in mode.file_problems([named])]
    assert sorted(found) == sorted(str(path) for path in (named, *(tmp_path / "fetched" / name for name in others)))


@pytest.mark.parametrize("entry_point", ["model.py", "/opt/other.py", "own.package"])
@pytest.mark.parametrize("variable", [None, "OPTION_ENTRYPOINT", "DJL_ENTRY_POINT"])
def test_entry_points_are_handlers_of_djl_python(tmp_path: Path, entry_point: str, variable: str | None) -> None:
    written = f"option.entryPoint={entry_point}" if variable is None else "option.dtype=fp16"
    directory = make(tmp_path, {**SAFE, "serving.properties": written})
    variables = {} if variable is None else {variable: entry_point}
    found = problems(directory, "DISALLOW_CUSTOM_INFERENCE_SCRIPTS", **variables)
    assert any(entry_point in line and "a handler of djl_python" in line for line in found), found


@pytest.mark.parametrize(
    "key", ["option.env", "option.hf_overrides", "option.load_on_devicez", "not_allowlisted", "option.handler"]
)
def test_keys_that_are_not_on_the_list_are_refused(tmp_path: Path, key: str) -> None:
    directory = make(tmp_path, {**SAFE, "serving.properties": f"option.dtype=fp16\n{key}=x"})
    assert any(f"{key} is not allowed in secure mode; remove the key" in line for line in problems(directory))


def test_variables_and_the_registration_obey_the_list_too(tmp_path: Path) -> None:
    directory = make(tmp_path, SAFE)
    refused(directory, "OPTION_ASYNC_MODE", "option.async_mode", OPTION_ASYNC_MODE="false")
    environment = {"SAGEMAKER_SECURE_MODE": "True", "SAGEMAKER_SECURITY_CONTROLS": ALL}
    found = inspect_model(directory, environment, {"option.env": "LD_PRELOAD=x"})
    assert any("option.env" in line and "secure mode" in line for line in found.problems)


def test_variables_of_the_platform_are_not_refused(tmp_path: Path) -> None:
    variables = {"SAGEMAKER_MODEL_SERVER_TIMEOUT_SECONDS": "60", "PREDICT_TIMEOUT": "60", "TENSOR_PARALLEL_DEGREE": "1"}
    assert problems(make(tmp_path, SAFE), **variables) == []


def test_workers_run_in_an_interpreter_of_the_image(tmp_path: Path) -> None:
    directory = make(tmp_path, {**SAFE, "serving.properties": "option.pythonExecutable=/tmp/python"})
    refused(directory, "/tmp/python", "/usr/bin/python3")
    refused(make(tmp_path / "other", SAFE), "PYTHON_EXECUTABLE", PYTHON_EXECUTABLE="/tmp/python")


def test_the_untrusted_channels_are_searched_and_the_others_are_trusted(tmp_path: Path) -> None:
    trusted = make(tmp_path / "trusted", {**SAFE, "pytorch_model.bin": "", "tokenizer_config.json": TEMPLATE})
    channel = make(tmp_path / "channel", {"a.safetensors": ""})
    other = make(tmp_path / "other", {"deep/a.pt": ""})
    assert problems(trusted, SAGEMAKER_UNTRUSTED_CHANNELS=str(channel)) == []
    refused(trusted, "other/deep/a.pt", SAGEMAKER_UNTRUSTED_CHANNELS=f"{channel}, {other}")
    (channel / "link").symlink_to(other)
    refused(trusted, "channel/link/deep/a.pt", SAGEMAKER_UNTRUSTED_CHANNELS=str(channel))
    missing = problems(trusted, SAGEMAKER_UNTRUSTED_CHANNELS=str(tmp_path / "nowhere"))
    assert missing == [f'variable SAGEMAKER_UNTRUSTED_CHANNELS: "{tmp_path / "nowhere"}" is not a directory']


def test_a_loop_of_links_ends(tmp_path: Path) -> None:
    directory = make(tmp_path, SAFE)
    (directory / "again").symlink_to(directory)
    assert problems(directory) == []


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"SAGEMAKER_SECURE_MODE": "true"}, "SAGEMAKER_SECURITY_CONTROLS is not set"),
        ({"SAGEMAKER_SECURE_MODE": "yes"}, "allowed: true or false"),
        ({"SAGEMAKER_SECURE_MODE": "true", "SAGEMAKER_SECURITY_CONTROLS": "DISALLOW_ALL"}, '"DISALLOW_ALL"'),
        ({"SAGEMAKER_SECURE_MODE": "true", "SAGEMAKER_SECURITY_CONTROLS": "a\nb"}, r'"a\nb" is not allowed'),
    ],
)
def test_variables_that_nobody_understands_stop_the_model(
    tmp_path: Path, variables: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigurationError) as raised:
        inspect_model(make(tmp_path, SAFE), variables)
    assert message in raised.value.message


@pytest.mark.parametrize("switch", ["", "false", "False"])
def test_controls_without_secure_mode_are_warned_about(tmp_path: Path, switch: str) -> None:
    variables = {"SAGEMAKER_SECURE_MODE": switch, "SAGEMAKER_SECURITY_CONTROLS": ALL}
    assert secure_mode(variables) is None
    found = inspect_model(make(tmp_path, {**SAFE, "model.py": "", "a.bin": ""}), variables)
    assert found.problems == ()
    assert "variable SAGEMAKER_SECURITY_CONTROLS has no effect without SAGEMAKER_SECURE_MODE=true" in found.warnings


def test_check_reports_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAGEMAKER_SECURE_MODE", "true")
    monkeypatch.setenv("SAGEMAKER_SECURITY_CONTROLS", "DISALLOW_PICKLE_FILES")
    result = CliRunner().invoke(app, ["check", str(make(tmp_path, {**SAFE, "a.pkl": ""}))])
    assert result.exit_code == 1
    assert "a.pkl is not allowed in secure mode" in result.output
