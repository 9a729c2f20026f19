"""A headless Chromium, and the console of a server in it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from paths import ROOT
from server_helpers import Server

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page

OWN = ROOT / ".venv" / "chromium" / "chromium"  # of scripts/setup_environment.py
CHROMIUM = next(filter(None, map(shutil.which, (str(OWN), "chromium", "chromium-browser", "google-chrome"))), None)
OWN_VARIABLES = {"LD_LIBRARY_PATH": str(OWN.parent / "lib"), "FONTCONFIG_PATH": str(OWN.parent)}
LIMIT_MS = 120_000  # other tests keep the processors busy
WIDE, NARROW = {"width": 1280, "height": 900}, {"width": 390, "height": 800}


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """Start the browser; without one on this machine the test is skipped."""
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine; make setup brings one where npm is, or: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # The only pages are those of this server; the sandbox needs rights that a container has not.
        started = playwright.chromium.launch(
            executable_path=CHROMIUM,
            args=["--no-sandbox"],
            env={**os.environ, **(OWN_VARIABLES if OWN.exists() else {})},
            timeout=LIMIT_MS,
        )
        yield started
        started.close()


@contextlib.contextmanager
def opened(browser: Browser, server: Server, part: str = "", **options: object) -> Iterator[Page]:
    """Open the console; what the browser complains of fails the test: errors, and what the policy blocks.

    That a call was refused is no fault of the page.
    """
    complaints: list[str] = []
    with browser.new_context(**{"viewport": WIDE, "locale": "en-US", **options}) as context:  # type: ignore[arg-type]
        context.set_default_timeout(LIMIT_MS)
        page = context.new_page()
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda said: complaints.append(said.text) if is_complaint(said) else None)
        page.goto(f"http://127.0.0.1:{server.port}/{part}")
        page.get_by_role("status").filter(has_text=re.compile("models? can serve")).wait_for()
        yield page
    assert complaints == []


def is_complaint(said: ConsoleMessage) -> bool:
    return said.type == "error" and not said.text.startswith("Failed to load resource")


def ask(page: Page, text: str) -> None:
    page.get_by_role("textbox", name="Message").fill(text)
    page.get_by_role("button", name="Send").click()


MESSAGE = {"server": {"version": "1", "since": 1}, "time": 1, "whole": True, "models": [], "totals": {}, "log": []}


def tell(page: Page, message: dict[str, object]) -> None:
    """Open the page again with this as what its server says."""
    page.route("**/console/live", lambda route: route.fulfill(body=f"data: {json.dumps(message)}\n\n"))
    page.reload()
