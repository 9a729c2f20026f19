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

import asyncio
import contextlib
import json
import multiprocessing
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import httpx

from benchmarks.figures import in_turns, parser_of, ratios, show
from benchmarks.generation import load_transformers, prompts
from benchmarks.load import TEXT, completion, run_load
from benchmarks.servers import MODEL, NAME, serving
from lmi_server.bench.records import Record, quantile

SHARED = 1024
PREFIXES = 5
MIXED = 64
STATIC = 8
STATIC_BATCHES = 2
SCARCE = 32
QUEUED = 32
TURNS = 4
BYTES_PER_TOKEN = 23040  # of the demo model's KV cache in bfloat16
VOCABULARY = (1000, 40000)  # token ids of ordinary words
Row = tuple[str, str, str]


@dataclass(frozen=True)
class Load:
    """One request: its prompt, and how many tokens it generates (at most, if the model may end the answer)."""

    prompt: list[int] | str
    new_tokens: int
    may_end: bool = False

    @property
    def body(self) -> dict[str, Any]:
        return completion(NAME, self.prompt, self.new_tokens, True, ignore_eos=not self.may_end)


def words(count: int, chance: random.Random) -> list[int]:
    return [chance.randrange(*VOCABULARY) for _ in range(count)]


def stream(port: int, loads: list[Load], texts: bool = False) -> list[Record]:
    """Send the requests at once and read their answers to the end; fail if tokens are missing."""
    bodies = [load.body for load in loads]
    _, records = asyncio.run(run_load(port, bodies, len(bodies), reads_texts=texts))
    for load, record in zip(loads, records, strict=True):
        if not load.may_end and record.output_tokens != load.new_tokens:
            raise AssertionError(f"{record.output_tokens} tokens of {load.new_tokens} came")
    return records


def first_s(record: Record) -> float:
    """Return the time to the first token."""
    assert record.first is not None, "a request generates a token at least"
    return record.first - record.sent


def middle_and_late(values: list[float]) -> tuple[float, float]:
    """Return median and 99th percentile."""
    return statistics.median(values), quantile(sorted(values), 0.99)


@contextlib.contextmanager
def warm_server(places: int, **options: object) -> Iterator[int]:
    """Serve the demo model, which has answered a few prompts; yield the port."""
    variables = {f"OPTION_{name.upper()}": str(value) for name, value in options.items()}
    chance = random.Random(9)
    with serving(MODEL, places, **variables) as server:
        stream(server.port, [Load(words(count, chance), 4) for count in (16, 64, 300, 600)])
        yield server.port


# --- the loads ---


def shared_prefix() -> Iterator[Row]:
    """Send the first request alone, then seven more at once; take medians over several prefixes."""
    chance = random.Random(1)
    firsts, latest = [], []
    with warm_server(8) as port:
        for _ in range(PREFIXES):
            prefix = words(SHARED, chance)
            loads = [Load(prefix + words(16, chance), 16) for _ in range(8)]
            firsts += map(first_s, stream(port, loads[:1]))
            latest.append(max(map(first_s, stream(port, loads[1:]))))
    ratio, _, _ = ratios(latest, firsts)
    yield (
        f"TTFT of 7 requests that share {SHARED:,} tokens with an earlier one, the longest / that one's",
        f"{statistics.median(latest) * 1e3:.0f} ms / {statistics.median(firsts) * 1e3:.0f} ms",
        f"{ratio:.2f}",
    )


def mixed_loads() -> list[Load]:
    chance = random.Random(2)
    return [Load(words(chance.randint(16, 1500), chance), chance.randint(4, 256)) for _ in range(MIXED)]


def mixed_lengths() -> Iterator[Row]:
    loads = mixed_loads()
    with warm_server(MIXED) as port:
        began = time.perf_counter()
        records = stream(port, loads)
        seconds = time.perf_counter() - began
    rate, static = sum(load.new_tokens for load in loads) / seconds, static_rate(loads)
    yield (
        f"{MIXED} requests of mixed lengths, tokens/s / static batches of {STATIC} of them",
        f"{rate:.0f} / {static:.0f}",
        f"{rate / static:.2f}",
    )
    gaps = [gap for record in records for gap in record.gaps]
    for values, title in ((list(map(first_s, records)), "time to first token"), (gaps, "inter-token latency")):
        median, late = middle_and_late(values)
        yield f"the same, {title}, p99 / median", f"{late:.2f} s / {median:.2f} s", f"{late / median:.2f}"


def static_rate(loads: list[Load]) -> float:
    """Return the tokens per second of the first static batches: all of them would take minutes."""
    model, _ = load_transformers()
    loads = loads[: STATIC * STATIC_BATCHES]
    began = time.perf_counter()
    for first in range(0, len(loads), STATIC):
        generate_static(model, loads[first : first + STATIC])
    return sum(load.new_tokens for load in loads) / (time.perf_counter() - began)


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


def scarce_memory() -> Iterator[Row]:
    for kind, loads in (("chats", chats()), ("full lengths", full_lengths())):
        rate, retracted, texts = rate_with_memory(loads, 1 / 3)
        enough_rate, _, enough_texts = rate_with_memory(loads, 1.0)
        same = sum(one == other for one, other in zip(texts, enough_texts, strict=True))
        yield (
            f"{SCARCE} {kind}, tokens/s, KV memory for a third / enough"
            f" ({retracted:.0f} retracted, {same} texts alike)",
            f"{rate:.0f} / {enough_rate:.0f}",
            f"{rate / enough_rate:.2f}",
        )


def rate_with_memory(loads: list[Load], share: float) -> tuple[float, float, list[int]]:
    """Run the loads at once, with memory for `share` of what they need at most.

    Return their tokens per second, how many were retracted, and a checksum of each text.
    """
    needed = sum((len(load.prompt) if isinstance(load.prompt, list) else 32) + load.new_tokens for load in loads)
    memory = share * needed * BYTES_PER_TOKEN / 2**30
    with warm_server(SCARCE, kv_cache_memory_gb=memory, max_model_len=1024) as port:
        began = time.perf_counter()
        records = stream(port, loads, texts=True)
        seconds = time.perf_counter() - began
        time.sleep(1.5)  # the worker sends its gauges once a second
        metrics = httpx.get(f"http://127.0.0.1:{port}/metrics").text
    retracted = next(line for line in metrics.splitlines() if "retracted_requests" in line and line[0] != "#")
    rate = sum(record.output_tokens for record in records) / seconds
    return rate, float(retracted.split()[-1]), [record.usage[TEXT] for record in records]


def long_queue() -> Iterator[Row]:
    """Send requests with two prefixes in any order; the KV memory holds what two of them need, and little more.

    A server of each policy takes the same requests in turns. Each turn has new prefixes.
    """
    memory = 2.2 * (SHARED + 20) * BYTES_PER_TOKEN / 2**30
    with ExitStack() as servers:

        def turns_of(policy: str) -> Callable[[], float]:
            server = warm_server(2, kv_cache_memory_gb=memory, schedule_policy=policy)
            port, chance = servers.enter_context(server), random.Random(4)

            def turn() -> float:
                loads = queued_loads(chance)
                began = time.perf_counter()
                stream(port, loads)
                return QUEUED / (time.perf_counter() - began)

            return turn

        rates = in_turns(TURNS, {policy: turns_of(policy) for policy in ("lpm", "fcfs")})
    ratio, _, _ = ratios(rates["lpm"], rates["fcfs"])
    yield (
        f"{QUEUED} requests with one of two prefixes of {SHARED:,} tokens, two at a time, requests/s, lpm / fcfs,"
        f" {TURNS} turns",
        f"{statistics.median(rates['lpm']):.1f} / {statistics.median(rates['fcfs']):.1f}",
        f"{ratio:.2f}",
    )


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


def beside_long_prompts() -> Iterator[Row]:
    """Yield the inter-token latency of a request while another process sends long prompts.

    The process that takes the times does nothing else: it would be late itself while it writes ten megabytes.
    """
    with warm_server(8) as port, beside(send_long_prompts, port):
        median, late = middle_and_late(gaps_of_one(port, 500))
    yield (
        "inter-token latency beside prompts of 2,000,000 and 200,000 words, p99 / median",
        f"{late * 1e3:.1f} ms / {median * 1e3:.1f} ms",
        f"{late / median:.2f}",
    )


def gaps_of_one(port: int, tokens: int) -> list[float]:
    (record,) = stream(port, [Load(words(16, random.Random(5)), tokens)])
    return record.gaps


@contextlib.contextmanager
def beside(function: Callable[..., None], *arguments: Any) -> Iterator[None]:
    """Run a function in another process meanwhile."""
    other = multiprocessing.get_context("spawn").Process(target=function, args=arguments, daemon=True)
    other.start()
    time.sleep(2)  # until it is busy
    yield
    other.terminate()


def spin() -> None:
    while True:
        pass


def beside_a_busy_process() -> Iterator[Row]:
    """Yield the inter-token latency of a request alone, and while a process keeps one core busy."""
    with warm_server(8) as port:
        alone = middle_and_late(gaps_of_one(port, 300))
        with beside(spin):
            busy = middle_and_late(gaps_of_one(port, 300))
    for name, one, other in zip(("median", "p99"), busy, alone, strict=True):
        yield (
            f"inter-token latency beside a process that keeps one core busy / alone, {name}",
            f"{one * 1e3:.1f} ms / {other * 1e3:.1f} ms",
            f"{one / other:.2f}",
        )


LOADS: dict[str, Callable[[], Iterator[Row]]] = {
    "shared": shared_prefix,
    "mixed": mixed_lengths,
    "scarce": scarce_memory,
    "queue": long_queue,
    "long": beside_long_prompts,
    "busy": beside_a_busy_process,
}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("loads", nargs="*", choices=("all", *LOADS), default="all", help="which loads")
    arguments = parser.parse_args()
    names = LOADS if "all" in arguments.loads else arguments.loads
    rows = [row for name in names for row in LOADS[name]()]
    show(("", "measured", "ratio"), rows, "Scheduling of the rolling batch, SmolLM2-135M (bf16), over HTTP, streaming")


if __name__ == "__main__":
    main()
