"""The command line, run as a user runs it."""

from __future__ import annotations

import json
import re
import struct
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import httpx
import pytest
from forked_servers import run_command
from paths import ROOT
from process_log import ProcessLog

from lmi_server.features import FEATURES


def lmi_server(*arguments: str, columns: str = "40") -> subprocess.CompletedProcess[str]:
    """Run the command in a narrow terminal with nothing of the tests' environment in it."""
    return run_command(*arguments, env={"COLUMNS": columns, "PATH": "/usr/bin:/bin"}, cwd=ROOT)


def test_version() -> None:
    result = lmi_server("version")
    assert (result.returncode, result.stdout.strip()) == (0, version("lmi-server"))


def test_version_is_a_flag_too() -> None:
    result = lmi_server("--version")
    assert (result.returncode, result.stdout.strip()) == (0, version("lmi-server"))


@pytest.mark.slow
def test_a_command_starts_without_the_front_end_and_other_commands() -> None:
    """Their imports would be a quarter and a fifth of the start of `version`, `check` or `explain`."""
    commands = {path.partition(":")[0] for feature in FEATURES for path in feature.commands.values()}
    late = {"frontend.app", "frontend.server", "starlette", "uvicorn", "lmi_server.commands.live.chat", *commands}
    program = (
        "import sys; from lmi_server.commands.cli import app; import typer; typer.main.get_command(app); "
        f"sys.exit(str({late} & set(sys.modules) or ''))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False)
    assert result.stderr.strip() == ""


@pytest.mark.parametrize("flags", [(), ("--model-store",)])
def test_serve_names_a_path_that_cannot_be_looked_up(flags: tuple[str, ...]) -> None:
    """Its name is too long; so is one below a directory of another user."""
    path = "m" * 300
    result = lmi_server("serve", *flags, path)
    assert result.returncode != 0
    assert "cannot be looked up: File name too long; this server runs as" in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_lists_the_commands(flag: str) -> None:
    result = lmi_server(flag, columns="100")
    assert result.returncode == 0
    assert all(command in result.stdout for command in ("serve", "version", "demo-model"))
    listed = re.findall(r"^│ ([a-z-]+)  ", result.stdout.partition("Commands")[2], re.MULTILINE)
    assert listed[0] == "serve"


def test_serve_names_faults_of_files_before_it_loads_them(tmp_path: Path) -> None:
    """A worker would come upon them after it has imported the engine, and be started again and again."""
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(b"cut")
    (tmp_path / "serving.properties").write_text("option.rolling_batch=scheduler\n")
    checked = lmi_server("check", str(tmp_path))
    assert checked.returncode == 1
    served = lmi_server("serve", str(tmp_path), "--port", "0")
    assert served.returncode == 1
    assert "model.safetensors" in served.stderr
    assert set(served.stderr.splitlines()) <= set(checked.stderr.splitlines())
    assert "listening" not in served.stderr


@pytest.mark.slow
def test_a_tokenizer_that_is_elsewhere_is_not_missed(tmp_path: Path) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    properties = tmp_path / "serving.properties"
    properties.write_text("option.rolling_batch=vllm\n")
    assert "holds no tokenizer" in lmi_server("check", str(tmp_path)).stderr
    properties.write_text("option.rolling_batch=vllm\noption.tokenizer=/somewhere/else\n")
    assert "holds no tokenizer" not in lmi_server("check", str(tmp_path)).stderr


def test_help_of_serve_shows_the_defaults() -> None:
    result = lmi_server("serve", "--help", columns="200")
    assert result.returncode == 0
    assert all(f"(default: {default})" in result.stdout for default in ("127.0.0.1", "8080", "30.0", "info"))


def test_configuration_errors_are_printed_plainly(tmp_path: Path) -> None:
    (tmp_path / "serving.properties").write_text("option.dtype=[bold]\njob_queue_size=0\n")
    result = lmi_server("serve", str(tmp_path), "--port", "0")
    assert result.returncode == 1
    lines = result.stderr.splitlines()
    assert f'{tmp_path}/serving.properties:1: option.dtype = "[bold]" is not allowed; allowed: auto, ' in lines[0]
    assert len(lines) == 3
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--port", "70000"], '--port "70000" is not allowed; allowed: an integer from 0 to 65535'),
        (
            ["--log-level", "loud"],
            'command line: log_level = "loud" is not allowed; allowed: debug, info, warning, error, off',
        ),
        (["--drain-timeout", "-1"], '--drain-timeout "-1" is not allowed; allowed: a number of seconds from 0 to'),
    ],
)
def test_bad_flags_are_printed_plainly(tmp_path: Path, arguments: list[str], problem: str) -> None:
    result = lmi_server("serve", str(tmp_path), *arguments)
    assert result.returncode == 1
    assert result.stderr.startswith(problem)


def test_a_missing_directory_is_printed_plainly(tmp_path: Path) -> None:
    result = lmi_server("serve", str(tmp_path / "nowhere"))
    assert result.returncode == 1
    assert result.stderr == (
        f"{tmp_path / 'nowhere'}: there is no such directory; a model is a directory, an archive, a file in GGUF, "
        "a model file of Ray in YAML, owner/name of the Hugging Face Hub, s3://bucket/prefix, gs://bucket/prefix, "
        "or a file: URL\n"
    )


@pytest.mark.slow
def test_serve_takes_models_as_lmi_does(tmp_path: Path) -> None:
    """-m takes several models, which are all; the store is in MODEL_SERVER_HOME; Kubernetes sets SERVING_PORT."""
    for name in ("a", "b", "unused"):
        (tmp_path / "store" / name).mkdir(parents=True)
        (tmp_path / "store" / name / "serving.properties").write_text("option.entryPoint=djl_python.echo")
    arguments = ["-s", "store", "-m", "x=a", "[y:2]=b", "--keep-going", "--port", "0"]
    variables = {"PATH": "/usr/bin:/bin", "MODEL_SERVER_HOME": str(tmp_path), "SERVING_PORT": "tcp://10.0.0.1:80"}
    command = [sys.executable, "-m", "lmi_server", "serve", *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=variables, cwd=ROOT) as process:
        log = ProcessLog(process.stderr)
        models = httpx.get(f"{log.wait_for(r'listening on (http://.*)')[1]}/models").json()["models"]
        process.terminate()
        log.close()
    assert [(model["modelName"], model.get("version")) for model in models] == [("x", None), ("y", "2")]


def test_a_model_that_cannot_be_loaded_ends_the_server(tmp_path: Path) -> None:
    result = lmi_server("serve", "-s", str(tmp_path / "no-store"), "-m", "x=no/such", f"y={tmp_path}/no", "--port", "0")
    assert result.returncode == 1
    reason, ending = (line for line in result.stderr.splitlines() if "model y" in line)
    assert "model y could not be loaded: url = " in reason
    assert "ending the server, because model y could not be loaded" in ending


def test_demo_model_refuses_a_foreign_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = lmi_server("demo-model", str(tmp_path))
    assert result.returncode == 1
    assert "is not a complete demo model" in result.stderr
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_demo_model_keeps_a_complete_directory(demo_model_dir: Path) -> None:
    result = lmi_server("demo-model", str(demo_model_dir))
    assert (result.returncode, result.stdout.strip()) == (0, f"{demo_model_dir}: complete, nothing to do")


LLAMA = '{"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}'


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """Return a directory with a configuration, a tokenizer, and weights of no tensors."""
    (tmp_path / "config.json").write_text(LLAMA)
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    return tmp_path


def test_explain_prints_values_with_their_places(model_dir: Path) -> None:
    (model_dir / "serving.properties").write_text("option.dtype=bf16\n")
    result = lmi_server("explain", str(model_dir), columns="200")
    assert (result.returncode, result.stderr) == (0, "")
    (line,) = [line for line in result.stdout.splitlines() if line.split()[:1] == ["option.dtype"]]
    assert line.split()[1:3] == ["bf16", "serving.properties:1"]
    assert "-m lmi_server.worker" in result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("columns", ["80", "200"])
def test_explain_reads_well_in_a_pipe(model_dir: Path, columns: str) -> None:
    (model_dir / "serving.properties").write_text(f"option.rolling_batch=scheduler\noption.quantize={'x' * 90}\n")
    result = lmi_server("explain", str(model_dir), columns=columns)
    lines = result.stdout.splitlines()
    assert lines[0] == f"{model_dir.name}: {model_dir}"
    assert lines[1] == f'handler huggingface: {model_dir}/serving.properties:1: option.rolling_batch = "scheduler"'
    titles = [line for line in lines if line and not line.startswith(" ")][2:-1]
    assert titles == [
        *("Decided", "Problems", "Worker command", "Worker environment", "Engine arguments"),
        "Memory of one worker, on each of its devices",
    ]
    whole = lmi_server("explain", str(model_dir), "--all", columns=columns).stdout
    first_words = {line.split()[0] for line in whole.splitlines() if line}
    keys = [option["key"] for option in json.loads(lmi_server("explain", str(model_dir), "--json").stdout)["options"]]
    assert first_words.issuperset(keys), "no key is broken"
    assert "option.model_loading_timeout" not in result.stdout
    meanings = [line for line in whole.splitlines() if line.startswith("      ")]
    assert max(map(len, meanings)) <= int(columns), "meanings are wrapped"


def test_explain_prints_json_alone(model_dir: Path) -> None:
    (model_dir / "serving.properties").write_text("option.rolling_batch=vllm\noption.dtype=[x]\n")
    result = lmi_server("explain", str(model_dir), "--json")
    explanation = json.loads(result.stdout)
    assert result.returncode == 1
    assert explanation["handler"] == "vllm"
    assert "[x]" in explanation["problems"][0]
    assert explanation["can_be_served"] is False


def test_check_prints_all_errors_at_once(model_dir: Path) -> None:
    (model_dir / "serving.properties").write_text("option.dtype=x\njob_queue_size=0\noption.threads=no\nbatch_size=?\n")
    result = lmi_server("check", str(model_dir))
    assert (result.returncode, result.stdout) == (1, "")
    lines = result.stderr.splitlines()
    assert sorted(line.split(":")[1] for line in lines) == ["1", "2", "3", "4"]


@pytest.mark.parametrize(
    ("properties", "code", "text"),
    [
        ("", 0, "no problem"),
        ("option.dtpye=fp16", 0, "did you mean option.dtype?"),
        ("engine=MPI\noption.rolling_batch=lmi-dist", 0, "no problem"),
        ("load_on_devices=0\noption.tensor_parallel_degree=max", 2, "and 0 are visible (counted from 0); use * or cpu"),
        ("option.rolling_batch=trtllm", 2, "needs the Python package tensorrt_llm, which is not installed; run: pip"),
        ("option.rolling_batch=trtllm", 2, "needs an NVIDIA GPU, and none is visible"),
    ],
)
def test_what_check_returns(model_dir: Path, properties: str, code: int, text: str) -> None:
    (model_dir / "serving.properties").write_text(properties)
    result = lmi_server("check", str(model_dir))
    assert result.returncode == code
    assert text in result.stdout + result.stderr


def test_check_looks_at_the_files_of_the_model(model_dir: Path) -> None:
    (model_dir / "model.safetensors").write_bytes(struct.pack("<Q", 2))
    (model_dir / "tokenizer.json").unlink()
    result = lmi_server("check", str(model_dir))
    assert result.returncode == 1
    cut, missing = result.stderr.splitlines()
    assert cut == f"{model_dir}/model.safetensors: is cut within its header, or is no safetensors file; copy it again"
    assert missing.startswith(f"{model_dir}: holds no tokenizer")


def test_serve_refuses_a_missing_handler_in_one_line(model_dir: Path) -> None:
    (model_dir / "serving.properties").write_text("engine=OnnxRuntime")
    result = lmi_server("serve", str(model_dir), "--port", "0")
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert "is not available in this version; missing: an engine in Java" in line


@pytest.mark.slow
def test_another_system_is_refused() -> None:
    """The platform is set in a process of its own, as a Mac would have it."""
    code = "import sys; from lmi_server.commands.cli import app; sys.platform = 'darwin'; app(['version'])"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60, check=False
    )
    assert result.returncode == 1
    assert result.stderr == "lmi-server runs on Linux, and this is darwin: use a Linux container or virtual machine.\n"
