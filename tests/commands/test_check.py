"""`lmi-server check` of several models, for hooks and workflows."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import yaml
from paths import ROOT
from typer.testing import CliRunner

from lmi_server.commands.cli import app

INDEX = "model.safetensors.index.json"


def model(directory: Path, text: str) -> str:
    directory.mkdir()
    (directory / "serving.properties").write_text(text)
    return str(directory / "serving.properties")


@pytest.fixture
def right(tmp_path: Path) -> str:
    return model(tmp_path / "right", "option.entryPoint=djl_python.echo\n")


@pytest.fixture
def wrong(tmp_path: Path) -> str:
    return model(tmp_path / "wrong", "option.entryPoint=djl_python.echo\n\nminWorkers=two\n")


@pytest.fixture
def elsewhere(tmp_path: Path) -> str:
    return model(tmp_path / "elsewhere", "engine=PyTorch\n")


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["check", *arguments])
    return done.exit_code, done.output


def test_a_file_stands_for_its_directory(right: str) -> None:
    assert run(right) == (0, f"{right}: 0 warnings, no problem\n")


def test_one_warning_is_no_plural(tmp_path: Path) -> None:
    path = model(tmp_path / "warned", "option.entryPoint=djl_python.echo\noption.nokey=1\n")
    code, printed = run(path)
    assert (code, printed.splitlines()[-1]) == (0, f"{path}: 1 warning, no problem")


def test_one_wrong_model_of_several_fails(right: str, wrong: str, elsewhere: str) -> None:
    code, printed = run(elsewhere, right, wrong)
    assert code == 1
    assert f"{wrong}:3: minWorkers" in printed
    assert f"{right}: 0 warnings, no problem" in printed
    assert run(right, elsewhere)[0] == 2
    assert run(str(Path(right).parent / "missing"), right)[0] == 1


def test_a_name_that_is_too_long_is_refused() -> None:
    code, printed = run("a" * 5000)
    assert code == 1
    assert printed.startswith('model "/')
    assert printed.endswith(' characters)" cannot be looked up: File name too long\n')
    assert len(printed) < 200


@pytest.mark.parametrize("name", ["serving.properties", "config.json", "tokenizer_config.json", INDEX])
def test_a_pipe_in_place_of_a_file_is_not_waited_for(name: str, tmp_path: Path) -> None:
    directory = Path(model(tmp_path / "piped", "engine=Python\n")).parent
    (directory / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    (directory / name).unlink(missing_ok=True)
    os.mkfifo(directory / name)
    code, printed = run(str(directory))
    assert code == 1
    assert "Traceback" not in printed


def test_an_index_of_any_depth_is_read(tmp_path: Path) -> None:
    directory = Path(model(tmp_path / "deep", "engine=Python\n")).parent
    (directory / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    (directory / INDEX).write_text("[" * 100_000)
    code, printed = run(str(directory))
    assert code == 1
    assert "Traceback" not in printed
    assert f"{INDEX}: is cut" in printed


@pytest.mark.parametrize("end", ["\n", "\r", "\u2028"])
def test_a_directory_with_a_line_end_in_its_name_is_refused_on_one_line(end: str, tmp_path: Path) -> None:
    directory = Path(model(tmp_path / f"a{end}ERROR forged", "engine=Python\nminWorkers=many\n")).parent
    for command in ("check", "explain"):
        done = CliRunner().invoke(app, [command, str(directory)])
        assert done.exit_code == 1
        (line,) = (done.stdout + done.stderr).splitlines()
        assert line.startswith(f'model directory "{tmp_path}/a\\')
        assert line.endswith('ERROR forged" has a line end in its name; rename it')


def test_a_value_controls_no_terminal(tmp_path: Path) -> None:
    text = "option.entryPoint=djl_python.echo\nminWorkers=\\u001b[2J\\nforged\noption.nokey\\u009b=\\u202e\n"
    path = model(tmp_path / "hostile", text)
    code, printed = run(path)
    assert code == 1
    assert f'{path}:2: minWorkers = "\\x1b[2J\\nforged" is not allowed' in printed
    shown = CliRunner().invoke(app, ["explain", os.path.dirname(path)]).output
    assert r"option.nokey\x9b" in shown
    assert not {"\x1b", "\x9b"} & set(printed + shown)


def test_elsewhere_only_wrong_models_fail(right: str, wrong: str, elsewhere: str) -> None:
    assert run("--elsewhere", right, elsewhere)[0] == 0
    assert run("--elsewhere", wrong)[0] == 1


def test_annotations_stand_at_their_lines(wrong: str, tmp_path: Path) -> None:
    code, printed = run("--github", wrong)
    assert code == 1
    assert printed.startswith(f"::error file={wrong},line=3::minWorkers")
    wide = model(tmp_path / "模型\u3000目录", "minWorkers=many\n")
    assert run("--github", wide)[1].startswith(f"::error file={wide},line=1::minWorkers")
    escape = model(tmp_path / "escape", "a=\\u12\n")
    assert run("--github", escape)[1].startswith(f"::error file={escape},line=1::malformed escape")
    hidden = model(tmp_path / "hostile", "minWorkers=1\\n::add-mask::x\n")
    assert all(line.startswith("::error") for line in run("--github", hidden)[1].splitlines())


def test_the_action_checks_every_serving_properties_of_a_checkout(tmp_path: Path) -> None:
    step = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))["runs"]["steps"][1]["run"]
    program = tmp_path / "place" / "bin" / "lmi-server"  # a fake, which prints its arguments
    program.parent.mkdir(parents=True)
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    program.chmod(0o755)
    checkout = tmp_path / "checkout"
    for name in ("a b", "$(touch evil)"):
        (checkout / name).mkdir(parents=True)
        (checkout / name / "serving.properties").touch()
    subprocess.run(["git", "init", "-q"], cwd=checkout, check=True)
    subprocess.run(["git", "add", "-A"], cwd=checkout, check=True)

    def models(names: str) -> list[str]:
        environment = {**os.environ, "MODELS": names, "PLACE": str(tmp_path / "place")}
        run = ["bash", "-eo", "pipefail", "-c", step]
        return subprocess.check_output(run, cwd=checkout, env=environment, text=True).splitlines()

    arguments = ["check", "--elsewhere", "--github", "--"]
    assert models("") == [*arguments, "$(touch evil)/serving.properties", "a b/serving.properties"]
    assert models("one\n\n; touch evil\n") == [*arguments, "one", "; touch evil"]
    assert not (checkout / "evil").exists()


def test_the_hook_and_the_action_call_what_there_is(right: str) -> None:
    [hook] = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    program, *arguments = hook["entry"].split()
    assert program == "lmi-server"
    assert CliRunner().invoke(app, [*arguments, right]).exit_code == 0
    assert hook["language"] == "python"
    action = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
    script = "\n".join(step["run"] for step in action["runs"]["steps"])
    assert '/bin/lmi-server" check --elsewhere --github' in script
    # What follows in the job runs with its own Python, not with that of the check.
    assert "GITHUB_PATH" not in script
    # An input reaches a shell as a variable; put into the script, it would be code.
    assert "${{" not in script
    assert {"models", "python"} == action["inputs"].keys()
