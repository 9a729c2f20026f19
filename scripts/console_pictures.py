"""Takes the pictures of docs/console.md: `python -m scripts.console_pictures http://127.0.0.1:8080 [DIRECTORY]`.

The server at that address serves one model, best the demo model (`make run`). The command has it answer some requests,
and shows the parts of its console in headless Chromium. It needs Playwright and the Chromium of `make setup`.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from shutil import which
from typing import TYPE_CHECKING

import httpx

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = Path(sys.prefix) / "chromium" / "chromium"
WIDTH, HEIGHT = 1280, 900
LIMIT_MS = 120_000
_QUESTIONS = ("What is the capital of France?", "Name three colours.", "Write a line about rain.", "What is a token?")


def take(browser: Browser, url: str, directory: Path) -> None:
    """Write every picture of PICTURES into `directory`."""
    model = httpx.get(f"{url}/models").json()["models"][0]["modelName"]
    with ThreadPoolExecutor(len(_QUESTIONS)) as clients:
        list(clients.map(lambda question: _ask(url, question), _QUESTIONS * 3))
    for name, (scheme, part, show) in PICTURES.items():
        size = {"width": WIDTH, "height": HEIGHT}
        with browser.new_context(viewport=size, color_scheme=scheme, locale="en-US") as context:  # type: ignore[arg-type]
            context.set_default_timeout(LIMIT_MS)
            page = context.new_page()
            page.goto(f"{url}/console#{part.format(model=model)}")
            show(page)
            page.screenshot(path=directory / name)


def _ask(url: str, question: str) -> None:
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": 40, "stream": True}
    httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120).raise_for_status()


def _model(page: Page) -> None:
    page.get_by_role("heading", name="Configuration").wait_for()


def _live(page: Page) -> None:
    page.get_by_role("img", name="Tokens/s").locator("canvas").wait_for()


def _chat(page: Page) -> None:
    page.get_by_text("Parameters").click()
    page.get_by_role("textbox", name="Temperature").fill("0")
    page.get_by_role("textbox", name="Maximum tokens").fill("20")
    page.get_by_role("checkbox", name="Probabilities").check()
    page.get_by_text("Parameters").click()
    page.get_by_role("textbox", name="Message").fill(_QUESTIONS[0])
    page.get_by_role("button", name="Send").click()
    page.get_by_text("ended by").wait_for()


PICTURES: Mapping[str, tuple[str, str, Callable[[Page], None]]] = {
    "console-model.png": ("light", "model/{model}", _model),
    "console-live.png": ("dark", "live", _live),
    "console-chat.png": ("light", "chat", _chat),
}
"""By file: the theme, the part of the page, and what shows it."""


@contextlib.contextmanager
def headless() -> Iterator[Browser]:
    """Start the Chromium of `make setup`, or the machine's where that is not."""
    from playwright.sync_api import sync_playwright

    is_own = CHROMIUM.exists()
    variables = {"LD_LIBRARY_PATH": str(CHROMIUM.parent / "lib"), "FONTCONFIG_PATH": str(CHROMIUM.parent)}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM if is_own else which("chromium"),
            args=["--no-sandbox"],
            env={**os.environ, **(variables if is_own else {})},
        )
        yield browser
        browser.close()


def main() -> None:
    url, *directory = sys.argv[1:]
    with headless() as browser:
        take(browser, url.rstrip("/"), Path(*directory or ("docs",)))


if __name__ == "__main__":
    main()
