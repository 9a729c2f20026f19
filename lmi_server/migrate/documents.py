"""SageMaker's DescribeModel, Ollama's Modelfile, a Triton model repository and TorchServe's archive."""

from __future__ import annotations

import json
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lmi_server.configuration.model_file.positions import parse_documents
from lmi_server.contract.errors import ConfigurationError
from lmi_server.migrate.command_line import Flag
from lmi_server.migrate.engines import carry_option, vllm
from lmi_server.migrate.migration import Migration
from lmi_server.migrate.variables import carry_variables

LARGEST = 1048576
"""Bytes of a file that is read."""
_MAX_MEMBERS = 10_000  # of an archive
_COMPRESSIONS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # others may ask for gigabytes
_OWN_CODE = "write a model.py with a function handle: docs/own-code.md"
_FOR_REQUESTS = "requests name it, or generation_config.json of the model"
_HUB_FILE = re.compile(r"(?:hf\.co|huggingface\.co)/([\w.-]+/[\w.-]+(?::[\w.-]+)?)")
_NO_NUMBER = "it is no number"
_INSTRUCTION = re.compile(r"(\w+)[ \t]+(.*)", re.DOTALL)


def json_object(text: str) -> dict[str, Any]:
    """Return a JSON object. Raises ConfigurationError if the text is none."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"the file is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise ConfigurationError("the file is not a JSON object")
    return data


def from_sagemaker(data: Mapping[str, Any]) -> Migration:
    """Return the migration of DescribeModel's answer: its first container."""
    containers = data.get("Containers")
    first = data.get("PrimaryContainer") or (containers[0] if isinstance(containers, list) and containers else None)
    if not isinstance(first, dict):
        raise ConfigurationError("the answer has neither PrimaryContainer nor Containers")
    migration = Migration("SageMaker's DescribeModel")
    url = first.get("ModelDataUrl") or _data_source(first)
    if isinstance(url, str) and url:
        migration.carry_model("ModelDataUrl", url)
    environment = first.get("Environment")
    variables = {
        str(name): str(value) for name, value in (environment if isinstance(environment, dict) else {}).items()
    }
    if "option.model_id" in migration.values and "HF_MODEL_ID" in variables:
        migration.differ("HF_MODEL_ID", "it names a model beside the data, and goes before them")
        del migration.values["option.model_id"]
    carry_variables(migration, variables)
    for key in first:
        if key not in ("ModelDataUrl", "ModelDataSource", "Environment", "Image", "ContainerHostname"):
            migration.drop(key, "a matter of SageMaker: docs/sagemaker.md")
    if isinstance(containers, list) and len(containers) > 1:
        migration.drop(f"{len(containers) - 1} further containers", "a pipeline; each is a model of its own")
    return migration


def _data_source(container: Mapping[str, Any]) -> Any:
    source = container.get("ModelDataSource")
    inner = source.get("S3DataSource") if isinstance(source, dict) else None
    return inner.get("S3Uri") if isinstance(inner, dict) else None


def from_modelfile(text: str) -> Migration:
    """Return the migration of Ollama's Modelfile."""
    migration = Migration("a Modelfile of Ollama")
    stops: list[str] = []
    for name, value in _instructions(text):
        word = name.upper()
        rule = _MODELFILE.get(word)
        if rule is not None:
            rule(migration, value)
        elif word == "PARAMETER":
            _carry_parameter(migration, value, stops)
        else:
            migration.drop(name)
    if stops:
        migration.carry("PARAMETER stop", "option.stop_sequence", json.dumps(stops, ensure_ascii=False))
    return migration


def _instructions(text: str) -> Iterator[tuple[str, str]]:
    """Yield instructions and their values, those in three quotes over several lines included."""
    lines = iter(text.splitlines())
    for line in lines:
        found = _INSTRUCTION.fullmatch(line.strip())
        if found is None or line.lstrip().startswith("#"):
            continue
        value = found[2].strip()
        if value.startswith('"""'):
            parts = [value[3:]]
            while '"""' not in parts[-1] and (following := next(lines, None)) is not None:
                parts.append(following)
            value = "\n".join(parts).partition('"""')[0]
        yield found[1], value.strip('"')


def _from(migration: Migration, value: str) -> None:
    hub = _HUB_FILE.fullmatch(value)
    if hub is not None:
        migration.carry_model(f"FROM {value}", hub[1])
    elif value.startswith((".", "/", "~")) or value.endswith((".gguf", ".safetensors")):
        migration.carry_model(f"FROM {value}", value)
    else:
        migration.drop(
            f"FROM {value}", "a model of Ollama's registry; set option.model_id to one of the Hugging Face Hub"
        )


_MODELFILE: Mapping[str, Callable[[Migration, str], None]] = {
    "FROM": _from,
    "ADAPTER": lambda migration, value: migration.carry(
        f"ADAPTER {value}", "option.enable_lora", True, "put it into adapters/NAME, in the form of PEFT"
    ),
    "TEMPLATE": lambda migration, _: migration.differ(
        "TEMPLATE", "a template of Go; the model's own chat template is used"
    ),
    "SYSTEM": lambda migration, _: migration.drop("SYSTEM", "each request brings its system message"),
    "MESSAGE": lambda migration, value: migration.drop(f"MESSAGE {value}", "each request brings its messages"),
    "LICENSE": lambda migration, _: migration.drop("LICENSE", "it is no setting"),
}


def _carry_parameter(migration: Migration, text: str, stops: list[str]) -> None:
    name, _, value = text.partition(" ")
    value = value.strip().strip('"')
    keys = {"num_ctx": "option.max_model_len", "num_thread": "option.threads"}
    if name in keys:
        migration.carry(f"PARAMETER {name} {value}", keys[name], value)
    elif name.lower().startswith("stop"):
        stops.append(value)
    else:
        migration.drop(f"PARAMETER {name} {value}", _FOR_REQUESTS)


def from_triton(directory: Path) -> Migration:
    """Return the migration of a Triton model: its directory, or a repository with one model."""
    configs = sorted([*directory.glob("config.pbtxt"), *directory.glob("*/config.pbtxt")])[:100]
    if len(configs) != 1:
        names = ", ".join(config.parent.name for config in configs)
        raise ConfigurationError(f"{directory}: name the directory of one model: {names or 'there is no config.pbtxt'}")
    config = read_text(configs[0])
    migration = Migration(f"the Triton model {configs[0].parent.name}")
    backend = next(iter(_fields(config, "backend|platform")), "")
    if _VLLM.search(backend):
        _carry_vllm_model(migration, configs[0].parent)
    elif _TENSORRT_LLM.search(backend):
        migration.carry(f"backend {backend}", "option.rolling_batch", "trtllm")
        migration.differ(
            "the engine directory", "name the checkpoint in option.model_id; the engine is built when it loads"
        )
    else:
        migration.drop(f"backend {backend}", f"no handler serves it; {_OWN_CODE}")
    for count in _fields(config, "count"):
        for key in ("minWorkers", "maxWorkers"):
            migration.carry(f"instance_group count {count}", key, count)
    _carry_batches(migration, config, bool(_VLLM.search(backend) or _TENSORRT_LLM.search(backend)))
    for name in ("input", "output"):
        if re.search(rf"(?m)^\s*{name}\s*[\[{{]", config):
            migration.drop(name, "the shapes of requests are those of the API: docs/api.md")
    return migration


_VLLM, _TENSORRT_LLM = re.compile("vllm"), re.compile("tensorrt_?llm")


def _carry_vllm_model(migration: Migration, directory: Path) -> None:
    """Carry over the arguments in model.json of Triton's backend for vLLM."""
    paths = sorted(directory.glob("*/model.json"))[-1:]
    migration.carry("backend of vLLM", "option.rolling_batch", "vllm")
    for path in paths:
        for name, value in json_object(read_text(path)).items():
            text = json.dumps(value) if isinstance(value, dict | list | bool) else str(value)
            carry_option(migration, vllm(), Flag(name, str(name).replace("-", "_"), (text,)))
    if not paths:
        migration.drop("model.json", "the model has none in a version's directory")


def _carry_batches(migration: Migration, config: str, generates: bool) -> None:
    for size in _fields(config, "max_batch_size"):
        origin = f"max_batch_size {size}"
        if generates:
            migration.differ(origin, "the rolling batch decides: option.max_rolling_batch_size")
        elif not size.isdecimal():
            migration.drop(origin, _NO_NUMBER)
        elif int(size) > 1:
            migration.carry(origin, "batch_size", size)
    for delay in () if generates else _fields(config, "max_queue_delay_microseconds"):
        origin = f"max_queue_delay_microseconds {delay}"
        if delay.isdecimal():
            migration.carry(origin, "max_batch_delay", int(delay) // 1000)
        else:
            migration.drop(origin, _NO_NUMBER)


def _fields(config: str, name: str) -> list[str]:
    """Return the values of a field in the text format of protocol buffers, wherever it stands."""
    return re.findall(rf'(?m)^[^#"\n]{{0,200}}?\b(?:{name})\s{{0,20}}:\s{{0,20}}"?([\w.-]{{1,200}})', config)


def from_torchserve(path: Path) -> Migration:
    """Return the migration of an archive of TorchServe; two of its files are read, and none is unpacked."""
    try:
        with zipfile.ZipFile(path) as archive:
            return _from_archive(archive)
    # Members may be encrypted (RuntimeError), cut off (EOFError), or have impossible names or places (ValueError).
    except (zipfile.BadZipFile, zlib.error, OSError, RuntimeError, EOFError, ValueError) as error:
        raise ConfigurationError(f"{path}: is no archive that can be read: {error}") from error


def _from_archive(archive: zipfile.ZipFile) -> Migration:
    if len(archive.infolist()) > _MAX_MEMBERS:
        raise ConfigurationError(f"the archive has more than {_MAX_MEMBERS} members")
    manifest = json_object(_member(archive, "MAR-INF/MANIFEST.json"))
    model = manifest.get("model")
    if not isinstance(model, dict):
        raise ConfigurationError("MAR-INF/MANIFEST.json has no model")
    migration = Migration("an archive of TorchServe")
    if name := model.get("modelName"):
        migration.carry("modelName", "option.served_model_name", name)
    migration.drop(f"handler {model.get('handler')}", f"a handler of TorchServe is another contract; {_OWN_CODE}")
    if serialized := model.get("serializedFile"):
        migration.differ(f"serializedFile {serialized}", "unpack it into the model directory; model.py loads it")
    if requirements := model.get("requirementsFile"):
        migration.differ(f"requirementsFile {requirements}", "put it into the model directory as requirements.txt")
    if config := model.get("configFile"):
        _carry_settings(migration, _member(archive, str(config)), str(config))
    return migration


def _carry_settings(migration: Migration, text: str, file: str) -> None:
    documents = parse_documents(text, file)
    data = documents[0].data if documents else None
    keys = {
        "minWorkers": "minWorkers",
        "maxWorkers": "maxWorkers",
        "batchSize": "batch_size",
        "maxBatchDelay": "max_batch_delay",
        "responseTimeout": "option.predict_timeout",
        "startupTimeout": "option.model_loading_timeout",
        "jobQueueSize": "job_queue_size",
    }
    for name, value in (data if isinstance(data, dict) else {}).items():
        if name in keys:
            migration.carry(f"{name} of {file}", keys[name], value)
        else:
            migration.drop(f"{name} of {file}")


def _member(archive: zipfile.ZipFile, name: str) -> str:
    """Return a text of an archive. What it says of its size is not believed."""
    try:
        if archive.getinfo(name).compress_type not in _COMPRESSIONS:
            raise ConfigurationError(f"{name[:200]} of the archive is compressed in another way than by deflate")
        with archive.open(name) as file:
            data = file.read(LARGEST + 1)
    except KeyError:
        raise ConfigurationError(f"the archive has no {name[:200]}") from None
    return _decode(data, name)


def read_text(path: Path) -> str:
    """Return a file of at most a MiB as text. Raises ConfigurationError."""
    try:
        with path.open("rb") as file:
            return _decode(file.read(LARGEST + 1), str(path))
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read: {error.strerror}") from error


def _decode(data: bytes, name: str) -> str:
    if len(data) > LARGEST:
        raise ConfigurationError(f"{name[:200]}: is larger than {LARGEST} bytes")
    return data.decode("utf-8", errors="replace")
