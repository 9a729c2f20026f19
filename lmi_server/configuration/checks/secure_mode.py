"""SageMaker's secure mode: what a model and its adapters may hold and say if the platform does not trust them.

The variables, the controls and the allowed keys are those of DJL Serving's secure-mode plugin. Where that plugin leaves
a gap, the check here is stricter; docs/security.md lists the differences.
"""

from __future__ import annotations

import json
import os
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from lmi_server.configuration.handlers import HANDLERS
from lmi_server.configuration.layers import Given, Layer
from lmi_server.configuration.model_directory.gguf import is_gguf, read_gguf
from lmi_server.configuration.model_directory.model_code import MODEL_CODE
from lmi_server.configuration.options import NGRAM
from lmi_server.contract.errors import ConfigurationError
from lmi_server.contract.texts.quoting import excerpt

SECURE_MODE = "SAGEMAKER_SECURE_MODE"
SECURITY_CONTROLS = "SAGEMAKER_SECURITY_CONTROLS"
UNTRUSTED_CHANNELS = "SAGEMAKER_UNTRUSTED_CHANNELS"

REMOTE_CODE = "DISALLOW_TRUST_REMOTE_CODE"
SCRIPTS = "DISALLOW_CUSTOM_INFERENCE_SCRIPTS"
REQUIREMENTS = "DISALLOW_REQUIREMENTS_TXT"
PICKLE = "DISALLOW_PICKLE_FILES"
CHAT_TEMPLATE = "DISALLOW_CHAT_TEMPLATE"
CONTROLS = (REMOTE_CODE, SCRIPTS, REQUIREMENTS, PICKLE, CHAT_TEMPLATE)

PYTHON_EXECUTABLES = ("/opt/djl/vllm_venv/bin/python", "/usr/bin/python3")

_KEYS = """
batch_size engine job_queue_size load_on_devices maxWorkers max_batch_delay max_dynamic_batch_size max_idle_time
minWorkers option.awq_calib_size option.awq_format option.baichuan_model_version option.batch_scheduler_policy
option.batch_size option.calib_batch_size option.calib_size option.chatglm_model_version option.compiled_graph_path
option.context_length_estimate option.cpu_offload_gb_per_gpu option.disable_sliding_window
option.draft_model_compiled_path option.draft_model_tp_size option.dtype option.enable_chunked_prefill
option.enable_kv_cache_reuse option.enable_lora option.enable_mixed_precision_accumulation
option.enable_prefix_caching option.enable_saturate_infinity option.enable_streaming option.enable_trt_overlap
option.enforce_eager option.entryPoint option.gpt_model_version option.gpu_memory_utilization
option.group_query_attention option.kv_cache_free_gpu_mem_fraction option.load_by_shard option.load_format
option.load_in_8bit option.load_split_model option.logits_dtype option.lora_extra_vocab_size
option.low_cpu_mem_usage option.max_cpu_loras option.max_input_len option.max_lora_rank option.max_loras
option.max_model_len option.max_num_sequences option.max_num_tokens option.max_output_len
option.max_rolling_batch_prefill_tokens option.max_rolling_batch_size option.model_id option.model_loading_timeout
option.mpi_mode option.multi_block_mode option.multi_query_mode option.n_positions option.neuron_optimize_level
option.output_formatter option.parallel_loading option.pipeline_parallel_degree option.pythonExecutable
option.q_format option.quantize option.record_acceptance_rate option.revision option.rolling_batch
option.rotary_base option.rotary_dim option.rotary_scaling_factor option.rotary_scaling_type
option.smoothquant_alpha option.smoothquant_per_channel option.smoothquant_per_token
option.speculative_draft_model option.speculative_length option.task option.tensor_parallel_degree
option.tgi_compat option.tokens_per_block option.trtllm_checkpoint_path option.trust_remote_code option.unroll
option.use_custom_all_reduce option.use_fp8_context_fmha option.use_fused_mlp
"""
ALLOWED_KEYS = frozenset(_KEYS.split())
"""DJL Serving's list: no other key may be set in secure mode."""

# Layers that the author of the model can write. The others are the platform's, or follow from these.
_WRITTEN: tuple[Layer, ...] = ("registration", "serving.properties", "environment")
# DJL Serving looks for the first five; the others are pickles too.
_PICKLES = re.compile(r".*\.(bin|pt|pth|ckpt|pkl|pickle|joblib|cloudpkl|dill)", re.IGNORECASE)
_PICKLED_FORMATS = ("pt", "npcache")  # values of option.load_format
# Readers of tokenizers take a template from any of these; others are searched, too, but need not be readable.
_TEMPLATE_FIELD_FILES = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "processor_config.json",
    "chat_template.json",
)
_TEMPLATE_SUFFIX = ".jinja"
_JSON = ".json"
_SAFETENSORS = ".safetensors"
_PICKLE_START = re.compile(rb"\x80[\x02-\x05]")  # the protocols of Python 3; older ones are plain text
_ZIP = b"PK\x03\x04"
_MORE_TEMPLATES = "additional_chat_templates"  # a directory
_TEMPLATE_IN_GGUF = "tokenizer.chat_template"  # the beginning: a model may have several
_IN_SECURE_MODE = "is not allowed in secure mode"


@dataclass(frozen=True, slots=True)
class SecureMode:
    """The controls that are on, and the directories to search; without `channels` those of the model."""

    controls: frozenset[str]
    channels: tuple[Path, ...]

    def problems(self, given: Given, adapters: str, model_dir: Path, location: str) -> Iterator[str]:
        """Yield a line for each value and each file of a model that is not allowed.

        `given` holds all values, `adapters` is the directory of adapters beside the model or its weights, and
        `location` says where these weights are.
        """
        yield from _forbidden_keys(given)
        yield from self._forbidden_values(given)
        yield from self._code_in(model_dir)
        script = given.get("option.entryPoint")
        if script is not None and script.layer == "model directory" and os.path.dirname(script.raw):
            yield from self._code_in((model_dir / script.raw).parent)
        here = os.path.isdir(location) or (is_gguf(location) and os.path.isfile(location))
        places = dict.fromkeys([model_dir, *([Path(location)] if here else [])])
        for adapter in (child for place in places for child in _directories(place / adapters)):
            yield from self.adapter_problems(adapter)
        missing = [excerpt(str(channel)) for channel in self.channels if not channel.is_dir()]
        yield from (f'variable {UNTRUSTED_CHANNELS}: "{channel}" is not a directory' for channel in missing)
        yield from self.file_problems(self.channels or places)

    def adapter_problems(self, directory: Path) -> Iterator[str]:
        """Yield a line for each file of an adapter that is not allowed."""
        yield from self._code_in(directory)
        if PICKLE in self.controls:
            yield from _pickles(_files(directory))

    def file_problems(self, places: Iterable[Path]) -> Iterator[str]:
        """Yield a line for each pickle and each chat template in `places` and below; a place may be a file in GGUF."""
        files = dict.fromkeys(path for place in places for path in _files(place))
        if PICKLE in self.controls:
            yield from _pickles(files)
        if CHAT_TEMPLATE in self.controls:
            yield from _chat_templates(files)

    def _forbidden_values(self, given: Given) -> Iterator[str]:
        executable = given.get("option.pythonExecutable")
        if executable is not None and executable.raw not in PYTHON_EXECUTABLES:
            yield _refusal(given, "option.pythonExecutable", f"allowed: {' or '.join(PYTHON_EXECUTABLES)}")
        remote_code = given.get("option.trust_remote_code")
        if REMOTE_CODE in self.controls and remote_code is not None and remote_code.is_true:
            yield _refusal(given, "option.trust_remote_code", f"{REMOTE_CODE} is on; allowed: false")
        entry_point = given.get("option.entryPoint")
        if SCRIPTS in self.controls and entry_point is not None and not _is_built_in(entry_point.raw):
            yield _refusal(given, "option.entryPoint", f"{SCRIPTS} is on; allowed: a handler of djl_python")
        if PICKLE in self.controls:
            yield from _pickled_values(given)

    def _code_in(self, directory: Path) -> Iterator[str]:
        if SCRIPTS in self.controls and (directory / MODEL_CODE).exists():
            yield f"{directory / MODEL_CODE} {_IN_SECURE_MODE}; {SCRIPTS} is on: remove the file"
        if REQUIREMENTS in self.controls and (directory / "requirements.txt").exists():
            yield f"{directory / 'requirements.txt'} {_IN_SECURE_MODE}; {REQUIREMENTS} is on: remove the file"


def _is_built_in(entry_point: str) -> bool:
    """Return whether an entry point is one of djl_python; a name that ends with .py is a file of the model."""
    return entry_point.startswith("djl_python.") and HANDLERS.by_entry_point(entry_point) is not None


def secure_mode(environment: Mapping[str, str]) -> SecureMode | None:
    """Return what SageMaker's variables ask for; None if secure mode is off.

    Raises ConfigurationError if a variable has an unknown value: then the model may not be safe to serve.
    """
    switch = environment.get(SECURE_MODE, "").strip().lower()
    if switch not in ("", "true", "false"):
        raise ConfigurationError(f'variable {SECURE_MODE} = "{excerpt(switch)}" is not allowed; allowed: true or false')
    if switch != "true":
        return None
    controls = _names(environment, SECURITY_CONTROLS)
    if not controls:
        raise ConfigurationError(
            f"variable {SECURITY_CONTROLS} is not set, and {SECURE_MODE} is true; allowed: {', '.join(CONTROLS)}"
        )
    unknown = [name for name in controls if name not in CONTROLS]
    if unknown:
        raise ConfigurationError(
            f'variable {SECURITY_CONTROLS}: "{excerpt(unknown[0])}" is not allowed; allowed: {", ".join(CONTROLS)}'
        )
    return SecureMode(frozenset(controls), tuple(map(Path, _names(environment, UNTRUSTED_CHANNELS))))


def secure_mode_warnings(environment: Mapping[str, str]) -> Iterator[str]:
    """Yield a warning for each variable that has no effect because secure mode is off."""
    if environment.get(SECURE_MODE, "").strip().lower() != "true":
        for name in (SECURITY_CONTROLS, UNTRUSTED_CHANNELS):
            if _names(environment, name):
                yield f"variable {name} has no effect without {SECURE_MODE}=true"


def _names(environment: Mapping[str, str], variable: str) -> list[str]:
    return [name.strip() for name in environment.get(variable, "").split(",") if name.strip()]


def _refusal(given: Given, key: str, why: str) -> str:
    return f"{given[key].describe(key)} {_IN_SECURE_MODE}; {why}"


def _forbidden_keys(given: Given) -> Iterator[str]:
    for key, source in given.items():
        if source.layer in _WRITTEN and (source.spelling or key) not in ALLOWED_KEYS:
            yield f"{source.place}: {source.spelling or key} {_IN_SECURE_MODE}; remove the key"


def _pickled_values(given: Given) -> Iterator[str]:
    load_format = given.get("option.load_format")
    if load_format is not None and load_format.raw.lower() in _PICKLED_FORMATS:
        yield _refusal(given, "option.load_format", f"{PICKLE} is on; allowed: safetensors")
    # The engine fetches a draft model from the Hub by itself, and takes pickles if it finds nothing else.
    draft = given.get("option.speculative_draft_model")
    if draft is not None and draft.raw != NGRAM and not os.path.isdir(draft.raw):
        yield _refusal(given, "option.speculative_draft_model", f"{PICKLE} is on; allowed: a directory")


def _pickles(files: Iterable[Path]) -> Iterator[str]:
    for path in files:
        if _PICKLES.fullmatch(path.name) or _holds_pickle(path):
            yield f"{path} {_IN_SECURE_MODE}; {PICKLE} is on: only safetensors are loaded; remove or convert the file"


def _holds_pickle(path: Path) -> bool:
    """Return whether a file with any other name is a pickle, or an archive of torch: an index may name it as weights.

    A file in safetensors begins with a length, which may look like a pickle, but is read as nothing else.
    """
    if path.suffix == _SAFETENSORS:
        return False
    try:
        with path.open("rb") as file:
            start = file.read(len(_ZIP))
            if start != _ZIP:
                return _PICKLE_START.match(start) is not None
            with zipfile.ZipFile(file) as archive:
                return any(name.endswith("data.pkl") for name in archive.namelist())
    except zipfile.BadZipFile:
        return False
    except OSError:
        return True  # what cannot be read may be a pickle


def _chat_templates(files: Iterable[Path]) -> Iterator[str]:
    for path in files:
        if path.suffix == _TEMPLATE_SUFFIX or _has_chat_template(path):
            yield f"{path} {_IN_SECURE_MODE}; {CHAT_TEMPLATE} is on: remove its chat template"


def _has_chat_template(path: Path) -> bool:
    """Return whether the file has, or may have, a chat template in a field: a file that cannot be read counts."""
    if path.suffix.lower() == ".gguf":
        return _has_template_in_header(path)
    if path.suffix != _JSON:
        return False
    try:
        decoded = _decode(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return path.name in _TEMPLATE_FIELD_FILES
    return isinstance(decoded, dict) and "chat_template" in decoded


def _decode(data: bytes) -> Any:
    """Return what JSON holds; of an object in UTF-8, members are not decoded further, for a vocabulary is large."""
    try:
        return msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    except (ValueError, RecursionError):  # Python's reader takes more: a list, NaN, UTF-16
        return json.loads(data)


def _has_template_in_header(path: Path) -> bool:
    try:
        return any(key.startswith(_TEMPLATE_IN_GGUF) for key in read_gguf(path).values)
    except ConfigurationError:
        return True


def _directories(parent: Path) -> list[Path]:
    return [child for child in sorted(parent.iterdir()) if child.is_dir()] if parent.is_dir() else []


def _files(place: Path) -> Iterator[Path]:
    """Yield every file below, also behind links; a directory that is reached twice is read once.

    Of a file, yield the file and the tokenizers' and templates' files beside it.
    """
    if place.is_file():
        yield place
        yield from (path for path in sorted(place.parent.iterdir()) if path.suffix in (_TEMPLATE_SUFFIX, _JSON))
        place = place.parent / _MORE_TEMPLATES
    seen: set[str] = set()
    for parent, directories, files in os.walk(place, followlinks=True):
        directories[:] = [name for name in sorted(directories) if _first_time(os.path.join(parent, name), seen)]
        yield from (Path(parent, name) for name in sorted(files))


def _first_time(directory: str, seen: set[str]) -> bool:
    real = os.path.realpath(directory)
    new = real not in seen
    seen.add(real)
    return new
