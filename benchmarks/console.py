"""Measures what an open page of the console sees, and what it costs, while 32 streams run.

    python -m benchmarks.console [--seconds 60] [--streams 32]

A server of the echo handler sends each stream a token every 20 ms. Headless Chromium shows the page Live meanwhile, and
notes when it has drawn its charts. Prints how many streams were complete, the times between drawings, and how the
page's memory changed. Needs Playwright and the Chromium of `make setup`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from shutil import which
from typing import TYPE_CHECKING

import httpx
from rich.console import Console
from rich.table import Table

from benchmarks.generation import wait_until_ready
from benchmarks.relay import Server

if TYPE_CHECKING:
    from playwright.sync_api import Page

TOKEN_MS = 20
SETTLE_S = 5.0  # until the page has its charts and its first points
CHROMIUM = Path(sys.prefix) / "chromium" / "chromium"
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


def stream(port: int, tokens: int) -> bool:
    """Return whether a stream went on to its last token and its end."""
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": tokens, "stream": True}
    with httpx.stream("POST", f"http://127.0.0.1:{port}/v1/chat/completions", json=body, timeout=60) as response:
        *pieces, last = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    return last == "[DONE]" and json.loads(pieces[-1])["choices"][0]["finish_reason"] == "length"


def heap_mib(page: Page) -> float:
    """Return what the page's objects take after a collection."""
    session = page.context.new_cdp_session(page)
    session.send("HeapProfiler.collectGarbage")
    found = session.send("Runtime.getHeapUsage")["usedSize"] / 2**20
    session.detach()
    return float(found)


def opened(port: int) -> Iterator[Page]:
    from playwright.sync_api import sync_playwright

    path, own = which("chromium"), {}
    if CHROMIUM.exists():
        path = str(CHROMIUM)
        own = {"LD_LIBRARY_PATH": str(CHROMIUM.parent / "lib"), "FONTCONFIG_PATH": str(CHROMIUM.parent)}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"], env={**os.environ, **own})
        page = browser.new_page(locale="en-US")  # Chromium makes no language of the locale POSIX
        page.add_init_script(NOTE_DRAWINGS)
        page.goto(f"http://127.0.0.1:{port}/#live")
        yield page
        browser.close()


def measure(streams: int, seconds: float) -> None:
    with tempfile.TemporaryDirectory() as parent:
        directory = Path(parent) / "echo"
        directory.mkdir()
        lines = ("option.entryPoint=djl_python.echo", f"option.echo_delay_ms={TOKEN_MS}")
        (directory / "serving.properties").write_text("\n".join(lines) + f"\noption.max_rolling_batch_size={streams}\n")
        server = Server(
            sys.executable, "-m", "lmi_server", "serve", str(directory), "--port", "{port}", log=Path(parent) / "log"
        )
        try:
            wait_until_ready(server.port)
            for page in opened(server.port):
                with ThreadPoolExecutor(streams) as pool:
                    tokens = round((seconds + 2 * SETTLE_S) * 1000 / TOKEN_MS)
                    running = [pool.submit(stream, server.port, tokens) for _ in range(streams)]
                    page.get_by_role("img", name="Requests: running").wait_for()  # drawn once there are figures
                    page.wait_for_timeout(SETTLE_S * 1000)
                    before, begin = heap_mib(page), page.evaluate("performance.now()")
                    page.wait_for_timeout(seconds * 1000)
                    drawn = page.evaluate("begin => window.drawings.filter((at) => at > begin)", begin)
                    after = heap_mib(page)
                    complete = sum(each.result() for each in running)
        finally:
            server.stop()
    gaps = [later - earlier for earlier, later in zip([begin, *drawn], drawn, strict=False)]
    table = Table("measured", "value", "aim", title=f"The console during {seconds:g} s of {streams} streams")
    table.add_row("streams that were complete", f"{complete} of {streams}", "all")
    table.add_row("drawings of the charts", f"{len(drawn)}")
    table.add_row("ms between drawings, median", f"{statistics.median(gaps):,.0f}")
    table.add_row("ms between drawings, longest", f"{max(gaps):,.0f}", "at most 1,000")
    table.add_row("MiB of the page's objects, before and after", f"{before:.2f}, {after:.2f}", "flat")
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.console", description=__doc__)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long the page is watched")
    arguments = parser.parse_args()
    measure(arguments.streams, arguments.seconds)


if __name__ == "__main__":
    main()
