"""A model for the fake of TensorRT-LLM, and a server or a handler that runs on the fake.

Nothing here imports torch: the fake's tokenizer is the only part of a model that these tests need.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paths import ROOT, TESTS
from product_helpers import COMMANDS, Server, running
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

FAKE = TESTS / "support" / "fake_tensorrt_llm"
RECORD = "FAKE_TENSORRT_LLM_RECORD"
FAIL = "FAKE_TENSORRT_LLM_FAIL"
END = "</s>"
_CHAT_TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
# What differs in version 1.4, which builds no engines: names that its llmapi lacks, and texts of llm_args.py.
_LACKING = ("BuildConfig", "PluginConfig", "TrtLlmArgs")
_CHANGED = {
    "lora_manager": "lora_helper",
    "    onboard_blocks: bool = True\n": "",
    "    build_config: BuildConfig | None = None\n": "",
    "    tokens_per_block: int = 32\n": """\
    tokens_per_block: int = 32
    disk_cache_size: int | None = None
    disk_cache_path: str | None = None
    kv_events_config: Any = None
    iteration_stats_interval: int | None = None
    use_kv_cache_manager_v2: Any = "auto"
""",
    "    dynamic_batch_config: Any = None\n": """\
    dynamic_batch_config: Any = None
    waiting_queue_policy: str = "FCFS"
    use_python_scheduler: bool = False
    enable_prefix_aware_scheduling: bool = True
""",
    "    max_batch_size: int | None = None\n": "    max_batch_size: int | None = 2048\n",
    "    max_beam_width: int | None = None\n": "    max_beam_width: int | None = 1\n",
    "    ray_worker_extension_cls: str | None = None\n": """\
    ray_worker_extension_cls: str | None = None
    custom_tokenizer: str | None = None
    post_processor_hook: Any = None
    model_kwargs: dict[str, Any] | None = None
    pp_partition: list[int] | None = None
""",
}


def make_model(directory: Path) -> Path:
    """Save the configuration of a Llama, a tokenizer of bytes, and no weights; return the directory."""
    directory.mkdir(parents=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "chat_template": _CHAT_TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rope_theta": 10000.0}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def make_adapter(directory: Path, rank: int = 8) -> Path:
    """Save what an adapter of peft has, with weights that only the fake takes for some."""
    directory.mkdir(parents=True)
    (directory / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank}))
    (directory / "adapter_model.safetensors").write_bytes(b"weights")
    return directory


def records(path: Path, kind: str = "") -> list[dict[str, Any]]:
    """Return what the fake has recorded."""
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    return [line for line in lines if kind in ("", line["kind"])]


def variables(record: Path) -> dict[str, str]:
    """Return the environment of a process that finds the fake."""
    path = os.pathsep.join([str(FAKE), str(ROOT)])
    return {**os.environ, "PYTHONPATH": path, RECORD: str(record)}


@contextlib.contextmanager
def fake_server(directory: Path, record: Path) -> Iterator[Server]:
    """Serve the model in `directory`, with the fake in the place of TensorRT-LLM."""
    with running(Server(directory, COMMANDS, variables(record))) as server:
        yield server


def make_newer(directory: Path) -> Path:
    """Write the fake of a version without engines of TensorRT, and return the directory to import it from."""
    package = directory / "tensorrt_llm"
    shutil.copytree(FAKE / "tensorrt_llm", package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "_tensorrt_engine.py").unlink()
    (package / "lora_manager.py").rename(package / "lora_helper.py")
    (package / "version.py").write_text('__version__ = "1.4.0"\n')
    names, arguments = package / "llmapi" / "__init__.py", package / "llmapi" / "llm_args.py"
    kept = [line for line in names.read_text().splitlines() if line.strip('" ,') not in _LACKING]
    names.write_text("\n".join(kept))
    text = re.sub(rf"(?ms)^class ({'|'.join(_LACKING)})\(.*?(?=^class )", "", arguments.read_text())
    for former, newer in _CHANGED.items():
        assert former in text
        text = text.replace(former, newer)
    arguments.write_text(text)
    return directory


@contextlib.contextmanager
def fake_installed(place: Path = FAKE) -> Iterator[None]:
    """Let this process import the fake, and forget it afterwards with every module that has imported it."""
    sys.path.insert(0, str(place))
    try:
        yield
    finally:
        sys.path.remove(str(place))
        ours = ("handlers.tensorrt_llm.", "tensorrt_llm.")
        for name in [name for name in sys.modules if f"{name}.".startswith(ours)]:
            del sys.modules[name]
