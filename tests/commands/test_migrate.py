"""`lmi-server migrate`: what is carried over, what check says of it, and what hostile sources cannot do."""

from __future__ import annotations

import contextlib
import json
import zipfile
from pathlib import Path

import pytest
from command_lines import EVERY
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from lmi_server.commands.cli import app
from lmi_server.configuration.properties import parse_properties
from lmi_server.configuration.resolve import inspect_model
from lmi_server.contract.errors import ConfigurationError
from lmi_server.machine.inventory import Gpu, Machine
from lmi_server.migrate.command import migration_of
from lmi_server.migrate.command_line import LONGEST
from lmi_server.migrate.migration import Migration

MACHINE = Machine(
    total_bytes=2**38,
    available_bytes=2**37,
    gpus=tuple(Gpu(str(index), 2**36, 2**36) for index in range(8)),
    engines=frozenset({"vllm"}),
)
SECRET = "hf_abcdefghijklmnopqrstuvwx"


def kinds(migration: Migration) -> dict[str, str]:
    return {note.origin: note.kind for note in migration.notes}


def checked(migration: Migration, tmp_path: Path) -> dict[str, str]:
    """Return the values of what is written, after `check` has found nothing wrong with it."""
    migration.settle(MACHINE, {})
    text = migration.text()
    found = inspect_model(tmp_path, {}, machine=MACHINE, text=text)
    assert found.problems == () or all("config.json" in line for line in found.problems), text
    assert not [line for line in found.warnings if "unknown key" in line or "has no effect" in line]
    return {key: entry.value for key, entry in parse_properties(text, "file").entries.items()}


@pytest.mark.parametrize(("command", "expected"), EVERY, ids=range(len(EVERY)))
def test_a_real_command_line(command: str, expected: dict[str, str], tmp_path: Path) -> None:
    migration = migration_of([command])
    values = checked(migration, tmp_path)
    assert values.items() >= expected.items(), migration.notes
    assert SECRET not in migration.text()
    assert SECRET not in str(migration.notes)


def test_every_part_of_a_command_has_a_note() -> None:
    migration = migration_of(["vllm serve a/b --port 80 --swap-space 4 --dtype auto --root-path /x; rm -rf /tmp/y"])
    found = kinds(migration)
    assert found["--dtype auto"] == "carried"
    assert found["--port 80"] == "differs"
    assert found["--root-path /x"] == "not carried"
    assert found["rm -rf /tmp/y"] == "not carried"


def test_every_option_of_a_container_has_a_note() -> None:
    migration = migration_of(["docker run --rm --gpus all --env-file .env vllm/vllm-openai --model a/b"])
    assert kinds(migration).items() >= {"--gpus": "not carried", "--env-file": "not carried"}.items()


def test_the_server_among_the_commands_of_a_shell() -> None:
    shell = "cd /x && pip install y && export OPTION_DTYPE=fp16; exec vllm serve a/b --max-num-seqs 4"
    migration = migration_of([f"docker run --entrypoint sh vllm/vllm-openai -c '{shell}'"])
    values = migration.values
    assert [values[f"option.{key}"] for key in ("model_id", "max_rolling_batch_size", "dtype")] == ["a/b", "4", "fp16"]
    assert kinds(migration)["pip install y"] == "not carried"


def test_variables_that_a_script_exports() -> None:
    migration = migration_of(["export OPTION_DTYPE=fp16\nOPTION_REVISION=x vllm serve a/b"])
    assert (migration.values["option.dtype"], migration.values["option.revision"]) == ("fp16", "x")


@pytest.mark.parametrize(
    "lines",
    [
        [f"    environment: {{{', '.join(f'A{number}_TOKEN: secret{number}' for number in range(1001))}}}"],
        [f"    command: [serve, {', '.join(['-a'] * 5001)}]"],
    ],
    ids=["variables", "words"],
)
def test_more_than_a_server_ever_has(lines: list[str], tmp_path: Path) -> None:
    path = tmp_path / "compose.yaml"
    path.write_text("\n".join(["services:", "  a:", "    image: vllm/vllm-openai", *lines]))
    with pytest.raises(ConfigurationError, match=r"1001 variables|more than 5000 words"):
        migration_of([str(path)])


def test_words_that_the_shell_has_taken_apart() -> None:
    migration = migration_of(["vllm", "serve", "a/b", "--chat-template", "my file.jinja"])
    assert migration.values["option.chat_template"] == "my file.jinja"


COMPOSE = f"""\
x-common: &common
  restart: unless-stopped
services:
  chat:
    <<: *common
    image: vllm/vllm-openai:v0.9.0
    command: --model /models/llama --max-model-len 4096 --api-key swordfish1
    environment:
      - HF_TOKEN={SECRET}
      - VLLM_API_KEY=swordfish2
      - OPTION_ENABLE_LORA=true
      - DATABASE=postgres://user:swordfish3@db/x
    volumes: ["/data:/models", "cache:/cache"]
    ports: ["8000:8000"]
    deploy: {{resources: {{}}}}
  web:
    image: nginx
"""


def test_a_compose_file(tmp_path: Path) -> None:
    path = tmp_path / "compose.yaml"
    path.write_text(COMPOSE)
    migration = migration_of([str(path)])
    assert migration.values["option.model_id"] == "/data/llama"
    assert migration.values["option.enable_lora"] == "true"
    assert {"restart of chat", "deploy of chat", "the service web"} <= kinds(migration).keys()
    for secret in (SECRET, "swordfish1", "swordfish2", "swordfish3"):
        assert secret not in migration.text() + str(migration.notes)
    path.write_text(COMPOSE.replace("image: nginx", "image: lmsysorg/sglang\n    command: --model-path a/b"))
    with pytest.raises(ConfigurationError, match="name one by --service: chat, web"):
        migration_of([str(path)])
    assert migration_of([str(path)], "web").values["option.model_id"] == "a/b"


def test_sagemakers_description(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    environment = {
        "OPTION_ROLLING_BATCH": "vllm",
        "OPTION_MAX_MODEL_LEN": "4096",
        "TENSOR_PARALLEL_DEGREE": "2",
        "HF_TOKEN": SECRET,
        "SERVING_LOAD_MODELS": "ALL",
        "SAGEMAKER_PROGRAM": "inference.py",
    }
    container = {"Image": "djl-inference", "ModelDataUrl": "s3://bucket/model.tar.gz", "Environment": environment}
    path.write_text(json.dumps({"ModelName": "m", "PrimaryContainer": container, "ExecutionRoleArn": "x"}))
    migration = migration_of([str(path)])
    values = checked(migration, tmp_path)
    assert values["option.model_id"] == "s3://bucket/model.tar.gz"
    assert values["option.max_model_len"] == "4096"
    assert values["option.tensor_parallel_degree"] == "2"
    assert kinds(migration)["SERVING_LOAD_MODELS"] == "differs"
    assert SECRET not in migration.text()


KSERVE = f"""\
apiVersion: v1
kind: Secret
---
apiVersion: serving.kserve.io/v1beta1
kind: InferenceService
metadata: {{name: llama}}
spec:
  predictor:
    minReplicas: 2
    model:
      modelFormat: {{name: huggingface}}
      args: [--model_name=llama, --model_id=meta-llama/Llama-3.1-8B, --max-model-len=4096]
      env:
        - {{name: HF_TOKEN, value: {SECRET}}}
        - name: OTHER
          valueFrom: {{secretKeyRef: {{name: x, key: y}}}}
      resources: {{limits: {{nvidia.com/gpu: 1}}}}
"""


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("modelFormat: {name: sklearn}\n      storageUri: s3://bucket/model", {"option.model_id": "s3://bucket/model"}),
        (
            "modelFormat: {name: xgboost}\n      storageUri: pvc://claim/model",
            {"option.entryPoint": "djl_python.xgboost"},
        ),
        ("modelFormat: {name: huggingface}\n      storageUri: hf://a/b", {"option.model_id": "a/b"}),
    ],
)
def test_formats_of_kserve(model: str, expected: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "service.yaml"
    path.write_text(f"kind: InferenceService\nspec:\n  predictor:\n    model:\n      {model}\n")
    assert migration_of([str(path)]).values.items() >= expected.items()


def test_an_inference_service(tmp_path: Path) -> None:
    path = tmp_path / "service.yaml"
    path.write_text(KSERVE)
    migration = migration_of([str(path)])
    values = checked(migration, tmp_path)
    assert values["option.model_id"] == "meta-llama/Llama-3.1-8B"
    assert values["option.served_model_name"] == "llama"
    assert values["option.max_model_len"] == "4096"
    assert {"predictor.minReplicas", "model.resources"} <= kinds(migration).keys()
    assert SECRET not in migration.text() + str(migration.notes)


MODELFILE = '''# mine
FROM hf.co/bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M
PARAMETER num_ctx 4096
PARAMETER stop "<|im_end|>"
PARAMETER stop "User:"
PARAMETER temperature 0.7
TEMPLATE """{{ .Prompt }}
FROM evil
"""
SYSTEM You are a pirate.
'''


def test_a_modelfile(tmp_path: Path) -> None:
    path = tmp_path / "Modelfile"
    path.write_text(MODELFILE)
    migration = migration_of([str(path)])
    values = checked(migration, tmp_path)
    assert values["option.model_id"] == "bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M"
    assert values["option.max_model_len"] == "4096"
    assert json.loads(values["option.stop_sequence"]) == ["<|im_end|>", "User:"]
    assert kinds(migration)["PARAMETER temperature 0.7"] == "not carried"
    path.write_text("FROM llama3.2\n")
    assert kinds(migration_of([str(path)])) == {"FROM llama3.2": "not carried"}


def test_a_triton_model(tmp_path: Path) -> None:
    model = tmp_path / "repository" / "chat"
    (model / "1").mkdir(parents=True)
    (model / "config.pbtxt").write_text(
        'backend: "vllm"\ninstance_group [\n  { count: 2 kind: KIND_MODEL }\n]\nmax_batch_size: 0\ninput [ {name: "x"}]'
    )
    arguments = {"model": "facebook/opt-125m", "gpu_memory_utilization": 0.5, "enforce_eager": True, "nonsense": 1}
    (model / "1" / "model.json").write_text(json.dumps(arguments))
    migration = migration_of([str(tmp_path / "repository")])
    values = checked(migration, tmp_path)
    assert values["option.model_id"] == "facebook/opt-125m"
    assert values["option.gpu_memory_utilization"] == "0.5"
    assert values["option.enforce_eager"] == "true"
    assert values["maxWorkers"] == "2"
    (model / "config.pbtxt").write_text(
        'name: "x"\nplatform: "onnxruntime_onnx"\nmax_batch_size: 8\n'
        "dynamic_batching { max_queue_delay_microseconds: 5000 }\n"
    )
    other = migration_of([str(model)])
    assert other.values == {"batch_size": "8", "max_batch_delay": "5"}
    assert kinds(other)["backend onnxruntime_onnx"] == "not carried"


def archive(path: Path, members: dict[str, str]) -> str:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in members.items():
            file.writestr(name, content)
    return str(path)


def test_an_archive_of_torchserve(tmp_path: Path) -> None:
    manifest = {
        "model": {
            "modelName": "densenet",
            "handler": "image_classifier",
            "serializedFile": "m.pt",
            "configFile": "c.yaml",
        }
    }
    config = "minWorkers: 1\nmaxWorkers: 2\nbatchSize: 4\nmaxBatchDelay: 50\nresponseTimeout: 120\nparallelType: tp\n"
    path = archive(tmp_path / "m.mar", {"MAR-INF/MANIFEST.json": json.dumps(manifest), "c.yaml": config})
    migration = migration_of([path])
    assert migration.values["batch_size"] == "4"
    assert migration.values["option.predict_timeout"] == "120"
    assert kinds(migration)["handler image_classifier"] == "not carried"
    assert kinds(migration)["parallelType of c.yaml"] == "not carried"


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"x": ""}, "has no MAR-INF"),
        ({"MAR-INF/MANIFEST.json": "[" * 100_000}, "not valid JSON"),
        ({"MAR-INF/MANIFEST.json": '{"model": 3}'}, "has no model"),
        ({"MAR-INF/MANIFEST.json": " " * 3_000_000}, "is larger than"),
        ({"MAR-INF/MANIFEST.json": '{"model": {"configFile": "../../../etc/passwd"}}'}, "has no "),
        ({"MAR-INF/MANIFEST.json": '{"model": {"configFile": "a"}}', "a": "a: &a [*a]"}, "nested too deeply"),
        ({f"{number}": "" for number in range(10_001)}, "more than 10000 members"),
    ],
)
def test_hostile_archives(members: dict[str, str], message: str, tmp_path: Path) -> None:
    before = set(tmp_path.iterdir())
    with pytest.raises(ConfigurationError, match=message):
        migration_of([archive(tmp_path / "m.mar", members)])
    assert set(tmp_path.iterdir()) - before == {tmp_path / "m.mar"}


def test_a_command_that_is_too_long_for_the_name_of_a_file() -> None:
    migration = migration_of([f"vllm serve gpt2 --served-model-name {'x' * 300}"])
    assert migration.values["option.served_model_name"] == "x" * 300


@pytest.mark.parametrize("compression", [zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA])
def test_an_archive_whose_content_is_damaged(compression: int, tmp_path: Path) -> None:
    path = tmp_path / "m.mar"
    with zipfile.ZipFile(path, "w", compression) as file:
        file.writestr("MAR-INF/MANIFEST.json", '{"model": {"modelName": "m"}}')
    content = path.read_bytes()
    begin = zipfile.sizeFileHeader + len("MAR-INF/MANIFEST.json")
    path.write_bytes(content[:begin] + b"\xff" * 12 + content[begin + 12 :])
    with pytest.raises(ConfigurationError, match=r"no archive that can be read|another way than by deflate"):
        migration_of([str(path)])


def test_words_where_triton_has_numbers(tmp_path: Path) -> None:
    text = 'backend: "onnxruntime"\nmax_batch_size: abc\nmax_queue_delay_microseconds: 1.5\n'
    (tmp_path / "config.pbtxt").write_text(text)
    found = kinds(migration_of([str(tmp_path)]))
    assert found["max_batch_size abc"] == found["max_queue_delay_microseconds 1.5"] == "not carried"


@pytest.mark.parametrize(
    "command",
    [
        "vllm serve $(touch evil) --dtype `touch evil`",
        "vllm serve a/b; touch evil",
        "vllm serve a/b --served-model-name x && touch evil",
        "vllm serve a/b --tokenizer ${HOME} --seed $((1+1)) | touch evil",
        "bash -c 'bash -c \"vllm serve a/b $(touch evil)\"'",
        "vllm serve a/b > evil",
    ],
)
def test_nothing_of_a_command_runs(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    migration = migration_of([command])
    assert list(tmp_path.iterdir()) == []
    assert not any("$" in value or "`" in value for value in migration.values.values())
    assert "evil" not in "".join(migration.values.values())


@pytest.mark.parametrize(
    "source",
    [
        "",
        "ls -l",
        "vllm serve 'open",
        "x" * (LONGEST + 1),
        "vllm " + "--a b " * 3000,
        "-" * 5000,
        "bash -c 'bash -c x'",
        "docker run",
        "a\x00b",
    ],
)
def test_what_is_no_command_is_an_error(source: str) -> None:
    with pytest.raises(ConfigurationError):
        migration_of([source])


def test_no_value_begins_another_key(tmp_path: Path) -> None:
    migration = migration_of(
        ["vllm serve a/b --tokenizer 'x\noption.trust_remote_code=true' --seed '1\r\nminWorkers=9'"]
    )
    values = parse_properties(migration.text(), "file").entries
    assert not {"option.trust_remote_code", "minWorkers"} & values.keys()
    hostile = migration_of(
        [
            "vllm serve a/b '--dtype=x\n\noption.entryPoint=evil.py'",
        ]
    )
    assert "option.entryPoint" not in parse_properties(hostile.text(), "file").entries


@pytest.mark.slow
@given(st.lists(st.text(max_size=20), max_size=6))
def test_any_words_are_refused_or_become_keys_that_can_be_read(words: list[str]) -> None:
    try:
        migration = migration_of(["vllm", "serve", "a/b", *words])
    except ConfigurationError:
        return
    entries = parse_properties(migration.text(), "file").entries
    assert {key: entry.value.strip() for key, entry in entries.items()} == {
        key: value.strip() for key, value in migration.values.items()
    }


@pytest.mark.parametrize(
    "text",
    [
        "services:\n"
        + "".join(
            f"  a{n}: &a{n} {{image: vllm, x: [{', '.join([f'*a{n - 1}'] * 9)}]}}\n" for n in range(1, 12)
        ).replace("*a0", "1"),
        "services: 3",
        "services: {a: {image: vllm, command: {}}}",
        "kind: InferenceService\nspec: {predictor: {model: 3}}",
        "kind: InferenceService\nspec: 3",
        "a: 1",
        "[",
    ],
    ids=["bomb", "number", "mapping", "model", "spec", "other", "broken"],
)
def test_hostile_yaml(text: str, tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with contextlib.suppress(ConfigurationError):
        assert migration_of([str(path)]).values.keys() <= {"option.rolling_batch"}


def test_a_file_of_gigabytes_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "compose.yaml"
    with path.open("wb") as file:
        file.truncate(2**33)
    with pytest.raises(ConfigurationError, match="is larger than"):
        migration_of([str(path)])


def test_the_command_writes_and_reports(tmp_path: Path) -> None:
    target = tmp_path / "model"
    arguments = ["migrate", "--to", str(target), "vllm serve facebook/opt-125m --max-model-len 512 --port 1"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert "carried      --max-model-len 512: option.max_model_len=512" in done.output
    assert "differs      --port 1" in done.output
    written = (target / "serving.properties").read_text()
    assert "# --max-model-len 512\noption.max_model_len=512\n" in written
    again = CliRunner().invoke(app, arguments)
    assert again.exit_code == 1
    assert "--force writes over it" in again.output
    assert CliRunner().invoke(app, [*arguments[:1], "--force", *arguments[1:]]).exit_code == 0


@pytest.mark.parametrize(
    "command",
    [
        "vllm serve a/b --api-key zq7",
        "vllm serve a/b --api-key=zq7",
        "curl -H 'Authorization: Bearer zq7' http://x; vllm serve a/b",
        "huggingface-cli login --token zq7 && x --hf-token=zq7; vllm serve a/b",
        "vllm serve a/b --unknown-token zq7",
        "docker run -e OPTION_ENV=HF_TOKEN=zq7 -e HF_TOKEN=zq7 vllm/vllm-openai --model a/b",
        "docker run -e OPTION_API_KEY=zq7 vllm/vllm-openai --model a/b",
        "vllm serve a/b --tokenizer https://user:zq7@host/x",
        "MY_PASSWORD=zq7 python -m sglang.launch_server --model-path a/b --admin-api-key zq7",
    ],
)
def test_even_a_short_secret_is_neither_written_nor_reported(command: str) -> None:
    migration = migration_of([command])
    assert "zq7" not in migration.text() + str(migration.notes)
    assert migration.values["option.model_id"] == "a/b"


def test_a_number_beyond_all_bounds_is_refused() -> None:
    migration = migration_of([f"vllm serve a/b --max-model-len {'9' * 400}k"])
    migration.settle(MACHINE, {})
    assert "option.max_model_len" not in migration.values


def test_many_wrong_options_take_time_in_proportion(tmp_path: Path) -> None:
    options = " ".join(f"--max-num-seqs=x{number} --no-such-{number}=1 -tp=y" for number in range(1500))
    migration = migration_of([f"vllm serve a/b {options}"])
    migration.settle(MACHINE, {})
    assert migration.values == {"option.rolling_batch": "vllm", "option.model_id": "a/b"}
    assert len(migration.notes) > 1500


def test_without_a_directory_the_file_goes_to_standard_output() -> None:
    done = CliRunner().invoke(app, ["migrate", "--", "vllm", "serve", "a/b"])
    assert parse_properties(done.stdout, "x").entries["option.model_id"].value == "a/b"
    assert "carried" in done.stderr
