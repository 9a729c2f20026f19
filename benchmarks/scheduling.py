"""Measures the scheduling of the rolling batch with the demo model, over HTTP, streaming.

    python -m benchmarks.scheduling [shared] [mixed] [scarce] [queue] [long] [busy]

Each load has its own server:

- shared: 8 requests that share a prefix of 1,024 tokens
- mixed: 64 requests of mixed lengths at once, beside static batches of such requests with a padded `model.generate`
- scarce: 32 requests with KV memory for a third of what they need at most, beside the same requests with enough of it
- queue: 32 requests with one of two prefixes of 1,024 tokens, of which two run at a time, under lpm and fcfs in turns
- long: one request beside prompts of two million words, which are refused, and of 200,000, which are tokenized
- busy: one request beside a process that keeps one core busy, and alone

Without names, all loads run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from benchmarks.generation import MODEL, load_transformers, prompts, serving
from lmi_server.bench.records import quantile

SHARED = 1024
PREFIXES = 5
MIXED = 64
STATIC = 8
STATIC_BATCHES = 2
SCARCE = 32
QUEUED = 32
TURNS = 4
POLICIES = ("lpm", "fcfs")
BYTES_PER_TOKEN = 23040  # of the demo model's KV cache in bfloat16
VOCABULARY = (1000, 40000)  # token ids of ordinary words


@dataclass(frozen=True)
class Load:
    """One request: its prompt, and how many tokens it generates (at most, if the model may end the answer)."""

    prompt: list[int] | str
    new_tokens: int
    may_end: bool = False


@dataclass
class Timing:
    """The times at which a request was sent and its tokens arrived, in seconds."""

    sent: float
    tokens: list[float] = field(default_factory=list)
    text: str = ""

    @property
    def first(self) -> float:
        """Time to first token."""
        return self.tokens[0] - self.sent

    @property
    def gaps(self) -> list[float]:
        """Inter-token latencies."""
        return [after - before for before, after in zip(self.tokens, self.tokens[1:], strict=False)]


def words(count: int, chance: random.Random) -> list[int]:
    return [chance.randrange(*VOCABULARY) for _ in range(count)]


async def stream(port: int, load: Load) -> Timing:
    """Read one streamed answer to its end; fail if tokens are missing."""
    body = {
        "model": "smollm2_135m_instruct",
        "prompt": load.prompt,
        "max_tokens": load.new_tokens,
        "stream": True,
        "temperature": 0,
    }
    encoded = json.dumps(body | {"ignore_eos": not load.may_end, "logprobs": 0}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    timing = Timing(time.perf_counter())
    writer.write(f"{head}content-length: {len(encoded)}\r\n\r\n".encode() + encoded)
    status = await reader.readline()
    if b" 200 " not in status:
        raise AssertionError(f"{status!r}: {await reader.read()!r}")
    while line := await reader.readline():
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line.removeprefix(b"data: "))
        if "choices" not in event:
            raise AssertionError(f"the stream broke: {event}")
        choice = event["choices"][0]
        timing.tokens += [time.perf_counter()] * len((choice["logprobs"] or {}).get("tokens", ()))
        timing.text += choice["text"]
    writer.close()
    if not load.may_end and len(timing.tokens) != load.new_tokens:
        raise AssertionError(f"{len(timing.tokens)} tokens of {load.new_tokens} came")
    return timing


async def stream_all(port: int, loads: list[Load]) -> list[Timing]:
    return await asyncio.gather(*(stream(port, load) for load in loads))


def warm_up(port: int) -> None:
    chance = random.Random(9)
    asyncio.run(stream_all(port, [Load(words(count, chance), 4) for count in (16, 64, 300, 600)]))


# --- the loads ---


def shared_prefix() -> dict[str, float]:
    """Send the first request alone, then seven more at once; take medians over several prefixes."""
    chance = random.Random(1)
    firsts, latest = [], []
    with serving(MODEL, 8) as (_, port):
        warm_up(port)
        for _ in range(PREFIXES):
            prefix = words(SHARED, chance)
            loads = [Load(prefix + words(16, chance), 16) for _ in range(8)]
            (first,) = asyncio.run(stream_all(port, loads[:1]))
            firsts.append(first.first)
            latest.append(max(timing.first for timing in asyncio.run(stream_all(port, loads[1:]))))
    return {
        "first": statistics.median(firsts),
        "later": statistics.median(latest),
        "ratio": statistics.median(later / first for first, later in zip(firsts, latest, strict=True)),
    }


def mixed_loads() -> list[Load]:
    chance = random.Random(2)
    return [Load(words(chance.randint(16, 1500), chance), chance.randint(4, 256)) for _ in range(MIXED)]


def mixed_lengths() -> dict[str, float]:
    loads = mixed_loads()
    with serving(MODEL, MIXED) as (_, port):
        warm_up(port)
        began = time.perf_counter()
        timings = asyncio.run(stream_all(port, loads))
        seconds = time.perf_counter() - began
    firsts = [timing.first for timing in timings]
    gaps = [gap for timing in timings for gap in timing.gaps]
    return {
        "rate": sum(load.new_tokens for load in loads) / seconds,
        "TTFT median": statistics.median(firsts),
        "TTFT p99": quantile(sorted(firsts), 0.99),
        "ITL median": statistics.median(gaps),
        "ITL p99": quantile(sorted(gaps), 0.99),
    }


def static_batch() -> dict[str, float]:
    """Run the first static batch only: all of them would take minutes."""
    model, _ = load_transformers()
    loads = mixed_loads()[: STATIC * STATIC_BATCHES]
    began = time.perf_counter()
    for first in range(0, len(loads), STATIC):
        generate_static(model, loads[first : first + STATIC])
    return {"rate": sum(load.new_tokens for load in loads) / (time.perf_counter() - began)}


def generate_static(model: Any, batch: list[Load]) -> None:
    """Generate until the longest answer of the batch is complete."""
    import torch

    longest = max(len(load.prompt) for load in batch)
    ids = torch.tensor([[0] * (longest - len(load.prompt)) + load.prompt for load in batch])
    mask = torch.tensor([[0] * (longest - len(load.prompt)) + [1] * len(load.prompt) for load in batch])
    most = max(load.new_tokens for load in batch)
    model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=most, do_sample=False, pad_token_id=0)


def chats() -> list[Load]:
    """Return questions; the model ends a third of their answers long before the limit."""
    turn = "<|im_start|>user\n{}.<|im_end|>\n<|im_start|>assistant\n"
    return [Load(turn.format(prompt), 256, may_end=True) for prompt in prompts(SCARCE)]


def full_lengths() -> list[Load]:
    """Return requests that generate as many tokens as they may."""
    chance = random.Random(3)
    return [Load(words(chance.randint(16, 300), chance), chance.randint(64, 256)) for _ in range(SCARCE)]


def scarce_memory(loads: list[Load], share: float) -> dict[str, Any]:
    """Run the loads at once, with memory for `share` of what they need at most."""
    needed = sum((len(load.prompt) if isinstance(load.prompt, list) else 32) + load.new_tokens for load in loads)
    os.environ["OPTION_KV_CACHE_MEMORY_GB"] = str(share * needed * BYTES_PER_TOKEN / 2**30)
    os.environ["OPTION_MAX_MODEL_LEN"] = "1024"
    with serving(MODEL, SCARCE) as (_, port):
        warm_up(port)
        began = time.perf_counter()
        timings = asyncio.run(stream_all(port, loads))
        seconds = time.perf_counter() - began
        time.sleep(1.5)  # the worker sends its gauges once a second
        metrics = httpx.get(f"http://127.0.0.1:{port}/metrics").text
    retracted = next(line for line in metrics.splitlines() if "retracted_requests" in line and line[0] != "#")
    return {
        "rate": sum(len(timing.tokens) for timing in timings) / seconds,
        "retracted": float(retracted.split()[-1]),
        "texts": [timing.text for timing in timings],
    }


def long_queue() -> dict[str, float]:
    """Send requests with two prefixes in any order; the KV memory holds what two of them need, and little more.

    A server of each policy takes the same requests in turns, so that whatever else the machine does meets both. Each
    turn has new prefixes.
    """
    os.environ["OPTION_KV_CACHE_MEMORY_GB"] = str(2.2 * (SHARED + 20) * BYTES_PER_TOKEN / 2**30)
    rates: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    with ExitStack() as servers:
        ports = {}
        for policy in POLICIES:
            os.environ["OPTION_SCHEDULE_POLICY"] = policy
            ports[policy] = servers.enter_context(serving(MODEL, 2))[1]
            warm_up(ports[policy])
        for turn in range(TURNS):
            loads = queued_loads(random.Random(4 + turn))
            for policy in POLICIES if turn % 2 else POLICIES[::-1]:
                began = time.perf_counter()
                asyncio.run(stream_all(ports[policy], loads))
                rates[policy].append(QUEUED / (time.perf_counter() - began))
    ratio = statistics.median(lpm / fcfs for lpm, fcfs in zip(*rates.values(), strict=True))
    return {policy: statistics.median(found) for policy, found in rates.items()} | {"ratio": ratio}


def queued_loads(chance: random.Random) -> list[Load]:
    prefixes = [words(SHARED, chance) for _ in range(2)]
    return [Load(chance.choice(prefixes) + words(16, chance), 4) for _ in range(QUEUED)]


def send_long_prompts(port: int) -> None:
    """Send prompts of two million words, and of 200,000, one after the other until the process is ended."""
    bodies = [
        (path, json.dumps({"model": "smollm2_135m_instruct", "prompt": "word " * count}).encode())
        for path, count in (("/v1/completions", 2_000_000), ("/tokenize", 200_000))
    ]
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300) as client:
        while True:
            for path, body in bodies:
                client.post(path, content=body, headers={"content-type": "application/json"})


def beside_long_prompts() -> dict[str, float]:
    """Return the inter-token latency of a request while another process sends long prompts.

    The process that takes the times does nothing else: it would be late itself while it writes ten megabytes.
    """
    with serving(MODEL, 8) as (_, port):
        warm_up(port)
        others = multiprocessing.get_context("spawn").Process(target=send_long_prompts, args=(port,), daemon=True)
        others.start()
        time.sleep(2)  # until it sends
        gaps = asyncio.run(stream(port, Load(words(16, random.Random(5)), 500))).gaps
        others.terminate()
    return {"ITL median": statistics.median(gaps), "ITL p99": quantile(sorted(gaps), 0.99)}


def spin() -> None:
    while True:
        pass


def beside_a_busy_process() -> dict[str, float]:
    """Return the inter-token latency of a request alone, and while a process keeps one core busy."""
    with serving(MODEL, 8) as (_, port):
        warm_up(port)
        load = Load(words(16, random.Random(5)), 300)
        alone = asyncio.run(stream(port, load)).gaps
        other = multiprocessing.get_context("spawn").Process(target=spin, daemon=True)
        other.start()
        time.sleep(1)  # until it is busy
        beside = asyncio.run(stream(port, load)).gaps
        other.terminate()
    figures = {"alone": statistics.median(alone), "beside": statistics.median(beside)}
    return figures | {"alone p99": quantile(sorted(alone), 0.99), "beside p99": quantile(sorted(beside), 0.99)}


PARTS = {
    "shared prefix": shared_prefix,
    "mixed lengths": mixed_lengths,
    "static batch": static_batch,
    "chats, a third": lambda: scarce_memory(chats(), 1 / 3),
    "chats, enough": lambda: scarce_memory(chats(), 1.0),
    "full lengths, a third": lambda: scarce_memory(full_lengths(), 1 / 3),
    "full lengths, enough": lambda: scarce_memory(full_lengths(), 1.0),
    "queue": long_queue,
    "long prompts": beside_long_prompts,
    "busy process": beside_a_busy_process,
}

Row = tuple[str, str, str]


def run_apart(name: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.scheduling", "--part", name]
    finished = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    figures = json.loads(finished.stdout.decode().strip().rpartition("\n")[2])
    print(name, {key: value for key, value in figures.items() if key != "texts"}, file=sys.stderr)
    return figures


def shared_rows() -> Iterator[Row]:
    found = run_apart("shared prefix")
    yield (
        f"TTFT of 7 requests that share {SHARED:,} tokens with an earlier one, the longest / that one's",
        f"{found['later'] * 1e3:.0f} ms / {found['first'] * 1e3:.0f} ms",
        f"{found['ratio']:.2f}",
    )


def mixed_rows() -> Iterator[Row]:
    mixed = run_apart("mixed lengths")
    static = run_apart("static batch")["rate"]
    yield (
        f"{MIXED} requests of mixed lengths, tokens/s / static batches of {STATIC} of them",
        f"{mixed['rate']:.0f} / {static:.0f}",
        f"{mixed['rate'] / static:.2f}",
    )
    for name, title in (("TTFT", "time to first token"), ("ITL", "inter-token latency")):
        late, median = mixed[f"{name} p99"], mixed[f"{name} median"]
        yield f"the same, {title}, p99 / median", f"{late:.2f} s / {median:.2f} s", f"{late / median:.2f}"


def scarce_rows() -> Iterator[Row]:
    for load in ("chats", "full lengths"):
        third, enough = run_apart(f"{load}, a third"), run_apart(f"{load}, enough")
        same = sum(one == other for one, other in zip(third["texts"], enough["texts"], strict=True))
        yield (
            f"{SCARCE} {load}, tokens/s, KV memory for a third / enough"
            f" ({third['retracted']:.0f} retracted, {same} texts alike)",
            f"{third['rate']:.0f} / {enough['rate']:.0f}",
            f"{third['rate'] / enough['rate']:.2f}",
        )


def queue_rows() -> Iterator[Row]:
    found = run_apart("queue")
    yield (
        f"{QUEUED} requests with one of two prefixes of {SHARED:,} tokens, two at a time, requests/s, lpm / fcfs,"
        f" {TURNS} turns",
        f"{found['lpm']:.1f} / {found['fcfs']:.1f}",
        f"{found['ratio']:.2f}",
    )


def long_rows() -> Iterator[Row]:
    found = run_apart("long prompts")
    late, median = found["ITL p99"], found["ITL median"]
    yield (
        "inter-token latency beside prompts of 2,000,000 and 200,000 words, p99 / median",
        f"{late * 1e3:.1f} ms / {median * 1e3:.1f} ms",
        f"{late / median:.2f}",
    )


def busy_rows() -> Iterator[Row]:
    found = run_apart("busy process")
    for name, end in (("median", ""), ("p99", " p99")):
        beside, alone = found[f"beside{end}"], found[f"alone{end}"]
        yield (
            f"inter-token latency beside a process that keeps one core busy / alone, {name}",
            f"{beside * 1e3:.1f} ms / {alone * 1e3:.1f} ms",
            f"{beside / alone:.2f}",
        )


LOADS = {
    "shared": shared_rows,
    "mixed": mixed_rows,
    "scarce": scarce_rows,
    "queue": queue_rows,
    "long": long_rows,
    "busy": busy_rows,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("loads", nargs="*", choices=("all", *LOADS), default="all", help="which loads")
    parser.add_argument("--part", choices=PARTS, help="run only this one and print its figures as JSON")
    arguments = parser.parse_args()
    if arguments.part:
        print(json.dumps(PARTS[arguments.part]()))
        return
    shown = Table(title="Scheduling of the rolling batch, SmolLM2-135M (bf16), over HTTP, streaming")
    for column in ("", "measured", "ratio"):
        shown.add_column(column, justify="right" if column else "left")
    for name in LOADS if "all" in arguments.loads else arguments.loads:
        for row in LOADS[name]():
            shown.add_row(*row)
    Console().print(shown)


if __name__ == "__main__":
    main()
