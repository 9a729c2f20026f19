"""Uses the extension in VS Code as a person does: `python -m scripts.check_vscode.checks DIRECTORY`.

`prepare.sh DIRECTORY` has installed VS Code there. It needs Playwright, the Chromium of `make setup`, and pygls.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from lmi_server.machine.ports import free_port
from scripts.console_pictures import LIMIT_MS, headless

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

PROPERTIES = "engine=Python\noption.model_id=gpt2\noption.dtype=fp17\noption.max_rolling_batch_siz=8\n"
MODEL_FILE = "model_loading_config:\n  model_id: chat\n  model_source: gpt2\ndeployment_confg:\n  max_concurrent: 8\n"
COMMAND = [sys.executable, "-m", "lmi_server", "lsp"]


def main() -> None:
    directory = Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as folder, headless() as browser:
        work = Path(folder, "chat")
        work.mkdir()
        (work / "serving.properties").write_text(PROPERTIES, encoding="utf-8")
        (work / "model.yaml").write_text(MODEL_FILE, encoding="utf-8")
        with serving(directory, Path(folder, "data")) as url:
            page = browser.new_context(viewport={"width": 1280, "height": 800}, locale="en-US").new_page()
            page.set_default_timeout(LIMIT_MS)
            page.goto(f"{url}/?folder={work}")
            try:
                use(page, work)
            finally:
                page.screenshot(path=directory / "last.png")
    print("the extension works in VS Code")


@contextlib.contextmanager
def serving(directory: Path, data: Path) -> Iterator[str]:
    """Run VS Code, and yield its address; its settings name the language server of this environment."""
    (data / "User").mkdir(parents=True)
    settings = {"lmi-server.command": COMMAND, "workbench.startupEditor": "none", "telemetry.telemetryLevel": "off"}
    (data / "User" / "settings.json").write_text(json.dumps(settings), encoding="utf-8")
    port = free_port(None)
    program = directory / "node_modules" / "code-server" / "out" / "node" / "entry.js"
    options = {
        "--auth": "none", "--bind-addr": f"127.0.0.1:{port}", "--config": "/dev/null", "--user-data-dir": str(data),
        "--extensions-dir": str(directory / "extensions"),
    }  # fmt: skip
    command = ["node", str(program), *(text for option in options.items() for text in option), "--disable-update-check"]
    with (directory / "server.log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            until(lambda: answers(url), "VS Code does not answer; see server.log")
            yield url
        finally:
            process.terminate()


def answers(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(url).status_code < 500
    return False


def until(holds: Callable[[], bool], problem: str) -> None:
    """Wait a minute at most. Raises SystemExit with the problem."""
    for _ in range(600):
        if holds():
            return
        time.sleep(0.1)
    raise SystemExit(problem)


def use(page: Page, work: Path) -> None:
    """Open both files; look at findings, hover, quick fix and completion."""
    page.get_by_role("button", name="Yes, I trust the authors").click()
    open_file(page, "serving.properties")
    page.locator(".squiggly-error").first.wait_for()
    page.locator(".squiggly-warning").first.wait_for()
    say("findings", page.locator(".squiggly-error, .squiggly-warning").count())

    line(page, "option.dtype").locator("span span").first.hover()
    hover = page.locator(".monaco-hover:visible").filter(has_text="Allowed:").first
    hover.wait_for()
    say("hover", hover.inner_text().splitlines()[0])

    page.mouse.move(0, 0)
    hover.wait_for(state="hidden")
    line(page, "max_rolling_batch_siz").click()
    page.keyboard.press("Control+.")
    page.locator(".action-widget").get_by_text("option.max_rolling_batch_size").first.wait_for()
    page.keyboard.press("Enter")
    line(page, "option.max_rolling_batch_size=8").wait_for()
    say("quick fix", "option.max_rolling_batch_size=8")

    page.keyboard.press("Control+End")
    page.keyboard.type("option.enable_lo", delay=50)
    suggested = page.locator(".suggest-widget.visible")
    suggested.get_by_text("option.enable_lora").first.wait_for()
    page.keyboard.press("Enter")
    line(page, "option.enable_lora=").wait_for()
    page.keyboard.press("Control+Space")
    suggested.get_by_text("true", exact=True).wait_for()
    page.keyboard.type("true")
    page.keyboard.press("Escape")
    page.keyboard.press("Control+s")
    wanted = PROPERTIES.replace("siz=8", "size=8") + "option.enable_lora=true"
    until(lambda: (work / "serving.properties").read_text(encoding="utf-8") == wanted, "the file is not saved")
    say("completion", "option.enable_lora=true")

    open_file(page, "model.yaml")
    page.locator(".squiggly-warning, .squiggly-error").first.wait_for()
    say("model file", "findings")


def open_file(page: Page, name: str) -> None:
    page.get_by_role("treeitem", name=name).dblclick()
    page.get_by_role("tab", name=re.compile(name), selected=True).wait_for()
    page.locator(".view-line").first.wait_for()


def line(page: Page, text: str) -> Locator:
    return page.locator(".view-line", has_text=text)


def say(what: str, found: object) -> None:
    print(f"{what}: {found}", flush=True)


if __name__ == "__main__":
    main()
