"""Measures the relay (front end, link, and a worker with the echo handler) beside a bare uvicorn app that echoes.

    python -m benchmarks.relay

Servers and load generator run on the same machine, one comparison after the other. Prints a table.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import statistics
import sys

import uvicorn
import uvloop

from benchmarks.figures import parser_of, show
from benchmarks.raw_load import Load, Rates, echo, rates
from benchmarks.servers import Server, echo_server, started

EVENT = b'{"token":{"id":0,"text":" capital","log_prob":0.0}}\n'
BARE = (sys.executable, "-m", "benchmarks.relay", "--bare", "{port}")
Rows = list[tuple[str, ...]]


async def bare_app(scope, receive, send) -> None:  # type: ignore[no-untyped-def]
    """Echo the body, or stream events, in the server's own process: what uvicorn alone can do."""
    body = (await receive())["body"]
    request = json.loads(body)
    if not request["stream"]:
        length = b"%d" % len(body)
        headers = [(b"content-type", b"application/json"), (b"content-length", length)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})
        return
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/jsonlines")]})
    for _ in range(request["parameters"]["max_new_tokens"]):
        await send({"type": "http.response.body", "body": EVENT, "more_body": True})
        await asyncio.sleep(0)
    await send({"type": "http.response.body", "body": b""})


def serve_bare(port: int) -> None:
    uvicorn.run(
        "benchmarks.relay:bare_app",
        port=port, loop="uvloop", http="httptools", lifespan="off", access_log=False, log_level="warning",
    )  # fmt: skip


async def median_latency_ms(server: Server, seconds: float) -> float:
    """Return the median time to the first byte of a streamed answer, one stream at a time."""
    load = await Load.open(server, 1, echo(1, stream=True), stream=True)
    await asyncio.sleep(seconds)
    await load.close()
    return statistics.median(load.clients[0].latencies[20:]) * 1000


async def throughput(rows: Rows, seconds: float) -> None:
    with started(*BARE) as bare, echo_server(max_rolling_batch_size=256) as relay:
        bare.wait_until_ready(echo(1, stream=False))
        theirs, ours = [await rates(each, 64, echo(4, stream=False), False, seconds) for each in (bare, relay)]
        ratio = f"{ours.requests / theirs.requests:.2f}"
        what = "requests/s, 64 connections"
        rows.append((what, f"{ours.requests:,.0f}", f"{theirs.requests:,.0f}", ratio, ">= 8,000"))
        relay_ms, bare_ms = await median_latency_ms(relay, 2), await median_latency_ms(bare, 2)
        added, what = f"+{relay_ms - bare_ms:.2f} ms", "first byte, one stream, median ms"
        rows.append((what, f"{relay_ms:.2f}", f"{bare_ms:.2f}", added, "< 1 ms added"))
        rows += [await streaming(relay, bare, streams, "", seconds) for streams in (1, 8, 64, 256)]
        with echo_server(max_rolling_batch_size=256, echo_step="true") as stepping:
            rows += [await streaming(stepping, bare, streams, ", one a step", seconds) for streams in (1, 8, 64, 256)]


async def streaming(relay: Server, bare: Server, streams: int, how: str, seconds: float) -> tuple[str, ...]:
    theirs, ours = [await rates(each, streams, echo(2000, stream=True), True, seconds) for each in (bare, relay)]
    return (
        f"streamed tokens/s, {streams} streams{how}",
        f"{ours.tokens:,.0f} ({ours.chunks:,.0f} HTTP chunks, {1e6 * ours.cpu_s / ours.tokens:.1f} us CPU per token)",
        f"{theirs.tokens:,.0f}",
        f"{ours.tokens / theirs.tokens:.2f}",
        ">= 60,000",
    )


async def memory(rows: Rows) -> None:
    with echo_server(max_rolling_batch_size=1000, echo_delay_ms=100) as relay:
        before = relay.memory_mib()
        load = await Load.open(relay, 1000, echo(100_000, stream=True), stream=True)
        await asyncio.sleep(3)
        assert all(client.tokens for client in load.clients), "not every stream is open"
        figures = f"{relay.memory_mib():.0f} (idle {before:.0f})"
        rows.append(("front end MiB, 1,000 open streams", figures, "", "", "< 120"))
        await load.close()


async def waiting(rows: Rows, seconds: float) -> None:
    """Compare running streams with and without 10,000 waiting requests, in turns.

    The streams have the pace of an engine. At full speed every core would be busy, and the load generator's share of
    them would decide the figure. The CPU time per token shows what waiting requests cost.
    """
    with echo_server(max_rolling_batch_size=32, echo_delay_ms=2) as relay:
        load = await Load.open(relay, 32, echo(100_000_000, stream=True), stream=True)
        alone, crowded = [], []
        for _ in range(3):
            alone.append(await load.measure(relay, seconds))
            queued = await Load.open(relay, 10_000, echo(1, stream=False), stream=False)
            await asyncio.sleep(1)
            crowded.append(await load.measure(relay, seconds))
            await queued.close()
            await asyncio.sleep(1)
        await load.close()
    (before, cpu_before), (after, cpu_after) = (_tokens_and_cpu(rounds) for rounds in (alone, crowded))
    figures, change = f"{after:,.0f} (none waiting {before:,.0f})", f"{100 * (after / before - 1):+.1f} %"
    rows.append(("tokens/s, 32 streams, 10,000 waiting", figures, "", change, "> -2 %"))
    figures, change = f"{cpu_after:.1f} (none waiting {cpu_before:.1f})", f"{100 * (cpu_after / cpu_before - 1):+.1f} %"
    rows.append(("CPU us per token, the same", figures, "", change))


def _tokens_and_cpu(rounds: list[Rates]) -> tuple[float, float]:
    """Return the mean of tokens/s and of microseconds of CPU per token."""
    tokens = statistics.mean(measured.tokens for measured in rounds)
    return tokens, 1e6 * statistics.mean(measured.cpu_s for measured in rounds) / tokens


async def bench(seconds: float) -> None:
    rows: Rows = []
    await throughput(rows, seconds)
    await memory(rows)
    await waiting(rows, seconds)
    show(("measured", "relay", "bare uvicorn", "ratio", "aim"), rows, "The relay on this machine", 150)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seconds", type=float, default=3.0, help="how long each figure is measured")
    parser.add_argument("--bare", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.bare is not None:
        serve_bare(arguments.bare)
    else:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        uvloop.run(bench(arguments.seconds))


if __name__ == "__main__":
    main()
