"""The site that `make docs` builds, in a browser, from the disk: searchable, and nothing comes from elsewhere."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from paths import ROOT

pytestmark = pytest.mark.slow

PYTHON = ROOT / ".venv" / "docs" / "bin" / "python"  # of scripts/setup_environment.py
OWN = ROOT / ".venv" / "chromium" / "chromium"
CHROMIUM = next(filter(None, map(shutil.which, (str(OWN), "chromium", "chromium-browser", "google-chrome"))), None)
OWN_VARIABLES = {"LD_LIBRARY_PATH": str(OWN.parent / "lib"), "FONTCONFIG_PATH": str(OWN.parent)}
LIMIT_MS = 120_000


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not PYTHON.exists():
        pytest.skip("mkdocs-material is not installed; `make setup` installs it")
    directory = tmp_path_factory.mktemp("site")
    command = [PYTHON, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", directory]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    return directory


def test_nothing_of_a_page_comes_from_another_server(site: Path) -> None:
    loads = re.compile(r"<(?:script|img|iframe|link)\b[^>]*?(?:src|href)=[\"']?(https?:|//)[^>]*>")
    pages = list(site.rglob("*.html"))
    assert len(pages) > 40
    for page in pages:
        found = [match[0] for match in loads.finditer(page.read_text(encoding="utf-8"))]
        assert [each for each in found if "canonical" not in each] == [], page.name


def test_the_search_works_from_the_disk(site: Path) -> None:
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine; make setup brings one where npm is, or: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    asked: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM,
            args=["--no-sandbox"],  # which needs rights that a container has not; the pages are ours
            env={**os.environ, **(OWN_VARIABLES if OWN.exists() else {})},
            timeout=LIMIT_MS,
        )
        page = browser.new_page()
        page.set_default_timeout(LIMIT_MS)
        page.on("request", lambda request: asked.append(request.url))
        page.goto((site / "index.html").as_uri())
        page.locator("input.md-search__input").first.click()
        page.locator("input.md-search__input").first.type("dynamic_lora_loading_path")
        page.locator(".md-search-result__item a").first.wait_for()
        link = page.locator(".md-search-result__item a").first.get_attribute("href")
        browser.close()
    assert link is not None
    assert re.search(r"adapters|lora|configuration", link)
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []
