"""Measures what an open page of the console sees, and what it costs, while 32 streams run.

    python -m benchmarks.console [--seconds 60] [--streams 32]

A server of the echo handler sends each stream a token every 20 ms. Headless Chromium shows the page Live meanwhile, and
notes when it has drawn its charts. Prints how many streams were complete, the times between drawings, and how the
page's memory changed. Needs Playwright and the Chromium of `make setup`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import statistics
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from benchmarks.figures import parser_of, show
from benchmarks.load import CHAT, send
from benchmarks.servers import echo_server
from lmi_server.bench.arrivals import ClosedLoop
from scripts.console_pictures import headless

if TYPE_CHECKING:
    from playwright.sync_api import Page

TOKEN_MS = 20
SETTLE_S = 5.0  # until the page has its charts and its first points
# A chart is cleared before it is drawn again.
NOTE_DRAWINGS = """
    window.drawings = [];
    const clear = CanvasRenderingContext2D.prototype.clearRect;
    CanvasRenderingContext2D.prototype.clearRect = function (...area) {
        const now = performance.now(), last = window.drawings.at(-1);
        if (last === undefined || now - last > 100) window.drawings.push(now);  // the charts of one update are together
        return clear.apply(this, area);
    };
"""


def stream(port: int, tokens: int, streams: int) -> int:
    """Read some streams at once to their ends; return how many had all of their tokens."""
    messages = [{"role": "user", "content": "a"}]
    body = {"messages": messages, "max_tokens": tokens, "stream": True, "stream_options": {"include_usage": True}}
    records = asyncio.run(send(port, [body] * streams, ClosedLoop(streams), api=CHAT))
    return sum(record.is_good and record.output_tokens == tokens for record in records)


def heap_mib(page: Page) -> float:
    """Return what the page's objects take after a collection."""
    session = page.context.new_cdp_session(page)
    session.send("HeapProfiler.collectGarbage")
    found = session.send("Runtime.getHeapUsage")["usedSize"] / 2**20
    session.detach()
    return float(found)


@contextlib.contextmanager
def opened(port: int) -> Iterator[Page]:
    with headless() as browser:
        page = browser.new_page(locale="en-US")  # Chromium makes no language of the locale POSIX
        page.add_init_script(NOTE_DRAWINGS)
        page.goto(f"http://127.0.0.1:{port}/#live")
        yield page


def measure(streams: int, seconds: float) -> None:
    options = {"echo_delay_ms": TOKEN_MS, "max_rolling_batch_size": streams}
    with echo_server(**options) as server, ThreadPoolExecutor(1) as pool, opened(server.port) as page:
        tokens = round((seconds + 2 * SETTLE_S) * 1000 / TOKEN_MS)
        running = pool.submit(stream, server.port, tokens, streams)
        page.get_by_role("img", name="Requests: running").wait_for()  # drawn once there are figures
        page.wait_for_timeout(SETTLE_S * 1000)
        before, begin = heap_mib(page), page.evaluate("performance.now()")
        page.wait_for_timeout(seconds * 1000)
        drawn = page.evaluate("begin => window.drawings.filter((at) => at > begin)", begin)
        after = heap_mib(page)
        complete = running.result()
    gaps = [later - earlier for earlier, later in itertools.pairwise([begin, *drawn])]
    rows = [
        ("streams that were complete", f"{complete} of {streams}", "all"),
        ("drawings of the charts", f"{len(drawn)}", ""),
        ("ms between drawings, median", f"{statistics.median(gaps):,.0f}", ""),
        ("ms between drawings, longest", f"{max(gaps):,.0f}", "at most 1,000"),
        ("MiB of the page's objects, before and after", f"{before:.2f}, {after:.2f}", "flat"),
    ]
    show(("measured", "value", "aim"), rows, f"The console during {seconds:g} s of {streams} streams")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long the page is watched")
    arguments = parser.parse_args()
    measure(arguments.streams, arguments.seconds)


if __name__ == "__main__":
    main()
