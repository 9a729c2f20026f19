"""Serves a tiny random model of every causal language model that transformers knows, and compares it with generate().

    python -m benchmarks.zoo [--vllm] [--rows FILE] [--page FILE] [model_type ...]

Each model is served as `option.rolling_batch=auto` decides, and once more with `option.rolling_batch=scheduler`.
Several prompts of different lengths run at once, longer than every window and chunk of the model. Tokens and log
probabilities have to be those of greedy `generate` for each prompt alone. What the scheduler serves so is served as by
a busy server, too, and in bfloat16 (`benchmarks.zoo_mix`). Every model runs in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import accelerate
import bitsandbytes
import deepspeed
import peft
import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import handlers.huggingface.model
import handlers.rolling_batch.engine_loading
import handlers.tasks.handler
from benchmarks import zoo_mix, zoo_page
from benchmarks.tiny_checkpoints import NOT_BUILT, save
from benchmarks.zoo_serving import (
    EXACT,
    NEW_TOKENS,
    RAW,
    RIGHT,
    VLLM,
    WAYS,
    WRONG,
    Answer,
    Outcome,
    Row,
    prompts,
    serve,
    token_ids,
    until_the_end,
)
from handlers.vllm.architectures import can_generate
from lmi_server.configuration.resolve import inspect_model
from lmi_server.contract.errors import describe

IMPORTED_ONCE = (accelerate, bitsandbytes, deepspeed, handlers, peft)  # here, and not in each process
TIME_LIMIT = 1800


def reference(directory: Path) -> Any:
    """Return the model as transformers computes it."""
    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")  # transformers' other functions leave the soft cap out
    return model


def generated(model: Any, text: str) -> Answer:
    """Return what transformers generates for a text of one token per byte, alone."""
    ids = token_ids(text)
    batch = torch.tensor([ids])
    out = model.generate(
        input_ids=batch, attention_mask=torch.ones_like(batch), max_new_tokens=NEW_TOKENS, do_sample=False,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    new = out.sequences[0, len(ids) :].tolist()
    rows = [logits[0].float().log_softmax(-1)[token].item() for token, logits in zip(new, out.logits, strict=True)]
    return until_the_end(new, rows)


def examine(model_type: str, try_vllm: bool) -> Row:
    """Build, serve and compare one model type; `try_vllm` serves with vLLM too what the scheduler cannot."""
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as parent:
        directory = Path(parent)
        save(model_type, directory)
        model = reference(directory)
        right = [generated(model, text) for text in prompts()]
        (directory / RIGHT).write_text(json.dumps([asdict(answer) for answer in right]))
        architecture = json.loads((directory / "config.json").read_text())["architectures"][0]
        by_vllm = WAYS[inspect_model(directory, {}).spec.title] == VLLM
        auto = _in_a_fresh_process(directory) if by_vllm else serve(directory, right)
        by_name = auto if auto.way == "scheduler" else serve(directory, right, rolling_batch="scheduler")
        tried = try_vllm and by_name.result != EXACT and can_generate((architecture,), "gpu")
        vllm = _in_a_fresh_process(directory, "rolling_batch=vllm") if tried else None
        mix = zoo_mix.mixed(directory, model, right, generated) if by_name.result == EXACT else None
        alike = zoo_mix.alike(directory, model) if by_name.result == EXACT else None
    return Row(model_type, architecture, auto, by_name, vllm, mix, alike)


def _in_a_fresh_process(directory: Path, *options: str) -> Outcome:
    """Serve with vLLM, which has to be imported before numba."""
    command = [sys.executable, "-m", "benchmarks.zoo_serving", str(directory), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIME_LIMIT, check=False)
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        return Outcome(VLLM, RAW, f"its process ended with {done.returncode}: {done.stderr[-300:]}")
    return Outcome(**json.loads(lines[-1]))


def run(model_types: Sequence[str], try_vllm: bool, file: Path) -> None:
    """Examine the model types, each in a process of its own, and append a row for each to `file`."""
    for model_type in model_types:
        row = _in_a_process(model_type, try_vllm)
        with file.open("a", encoding="utf-8") as rows:
            rows.write(json.dumps(asdict(row)) + "\n")
        shown = [part for outcome in row.outcomes for part in _shown(outcome)]
        print(row.model_type, row.architecture, *shown, sep=" | ", flush=True)


def _in_a_process(model_type: str, try_vllm: bool) -> Row:
    context = multiprocessing.get_context("fork")
    received, sent = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(sent, model_type, try_vllm))
    process.start()
    sent.close()
    try:
        row = received.recv() if received.poll(TIME_LIMIT) else _lost(model_type, f"no answer in {TIME_LIMIT} s")
    except EOFError:
        process.join()
        row = _lost(model_type, f"its process ended with {process.exitcode}")
    process.kill()
    process.join()
    return row


def _send(sent: Any, model_type: str, try_vllm: bool) -> None:
    try:
        sent.send(examine(model_type, try_vllm))
    except Exception as error:  # noqa: BLE001 - as in `serve`: the model cannot be built, or not be generated with
        sent.send(_lost(model_type, describe(error)))


def _lost(model_type: str, message: str) -> Row:
    lost = Outcome("none", RAW, message)
    return Row(model_type, "", lost, lost)


def _shown(outcome: Outcome) -> tuple[str, ...]:
    return outcome.way, outcome.result, outcome.message[:300].replace("\n", " ")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_types", nargs="*", metavar="model_type")
    parser.add_argument("--vllm", action="store_true", help="serve with vLLM too what the scheduler cannot")
    parser.add_argument("--rows", type=Path, default=Path("zoo.jsonl"), help="the file of rows; those in it are kept")
    parser.add_argument("--page", type=Path, help="write the table to this file (docs/models.md)")
    arguments = parser.parse_args()
    names = arguments.model_types or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - NOT_BUILT.keys())
    known = {row.model_type for row in zoo_page.read(arguments.rows)}
    run([name for name in names if name not in known], arguments.vllm, arguments.rows)
    rows = zoo_page.read(arguments.rows)
    print(zoo_page.summary(rows))
    if arguments.page:
        arguments.page.write_text(zoo_page.page(rows), encoding="utf-8")
    bad = (WRONG, RAW, zoo_mix.DIFFERENT)
    return int(any(outcome.result in bad for row in rows for outcome in (row.auto, *row.busy)))


if __name__ == "__main__":
    sys.exit(main())
