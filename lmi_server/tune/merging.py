"""Merges an adapter into its model: `python -m lmi_server.tune.merging MODEL ADAPTER OUT`, in a process of its own.

The process ends with the memory that the weights took.
"""

from __future__ import annotations

import importlib
import re
import shutil
import sys
from pathlib import Path

_WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf", ".index.json")
_LORA = re.compile(r"^\s*option\.enable_lora\s*[=:\s].*\n?", re.MULTILINE)


def merge(model: Path, adapter: Path, out: Path) -> None:
    """Write the model with the adapter merged into its weights, and all else that is in its directory."""
    transformers, peft = map(importlib.import_module, ("transformers", "peft"))
    base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype="auto")
    peft.PeftModel.from_pretrained(base, adapter).merge_and_unload().save_pretrained(out)
    for file in model.iterdir():
        if file.is_file() and not (out / file.name).exists() and not file.name.endswith(_WEIGHTS):
            shutil.copy2(file, out)
    properties = out / "serving.properties"
    if properties.exists():  # what LoRA costs without an adapter is not part of this
        properties.write_text(_LORA.sub("", properties.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    merge(*map(Path, sys.argv[1:]))
