"""`python -m benchmarks.gguf_reading`: seconds of a processor that transformers takes for a file in GGUF.

It unpacks the weights of the demo model, whose file has 49,152 tokens, in fresh processes: in turns with the package
gguf as it is, and with what lmi_server/processes/gguf_package.py makes of it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from statistics import median

_LOAD = """
import sys, time
import torch, gguf
from transformers import AutoTokenizer, GgufConfig, LlamaForCausalLM
from lmi_server.commands.demo_model import _find_gguf
from lmi_server.processes import gguf_package
if sys.argv[1] == "prepared":
    gguf_package.prepare()
source, began = _find_gguf(), time.process_time()
AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
read = time.process_time()
weights = GgufConfig(dequantize=True, gguf_file=source.name)
LlamaForCausalLM.from_pretrained(source.parent, gguf_file=source.name, quantization_config=weights)
print(read - began, time.process_time() - read)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    turns = parser.parse_args().turns
    found: dict[str, list[list[float]]] = {"as it is": [], "prepared": []}
    for _ in range(turns):
        for name, taken in found.items():
            done = subprocess.run([sys.executable, "-c", _LOAD, name], capture_output=True, text=True, check=True)
            taken.append([float(seconds) for seconds in done.stdout.split()])
    for name, taken in found.items():
        tokenizer, weights = (median(seconds) for seconds in zip(*taken, strict=True))
        print(f"gguf {name}: {tokenizer:.1f} s for the tokenizer, {weights:.1f} s for the weights")


if __name__ == "__main__":
    main()
