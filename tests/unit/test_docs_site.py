"""docs/ as a site: each page is in the navigation, short, and begins with what its reader gets; links lead to headings.

`make docs` builds it; a test in tests/packaging looks at what it built.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from paths import ROOT

DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
MAX_WORDS = 3000  # but for generated reference

_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^#{1,6} (.+)$", re.MULTILINE)
_LINK = re.compile(r"\]\(([^)\s:]*?)(?:#([^)\s]+))?\)")


def text_of(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


def is_generated(page: str) -> bool:
    return re.search("generated|writes this page", text_of(page)[:1500]) is not None


def navigated(entry: Any) -> Iterator[str]:
    """Yield the pages of the navigation."""
    if isinstance(entry, str):
        yield entry
    else:
        for inner in entry.values() if isinstance(entry, dict) else entry:
            yield from navigated(inner)


def hooks() -> Any:
    path = ROOT / "scripts" / "docs_site" / "hooks.py"
    spec = importlib.util.spec_from_file_location("docs_site_hooks", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def anchors_of(text: str) -> set[str]:
    headings = (re.sub(r"[`*]|\]\([^)]*\)|\[", "", found) for found in _HEADING.findall(_FENCED.sub("", text)))
    named = {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}
    return named | set(re.findall(r'<a id="([^"]+)">', text))


def test_every_page_is_in_the_navigation_once() -> None:
    pages = list(navigated(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]))
    expected = [*PAGES, *hooks().IN_ROOT]
    assert sorted(pages) == sorted(expected), "add the page to `nav` in mkdocs.yml, at the task that it serves"


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_short_or_generated(page: str) -> None:
    words = len(text_of(page).split())
    assert words <= MAX_WORDS or is_generated(page), f"{words} words: split it by task"


@pytest.mark.parametrize("page", PAGES)
def test_a_page_begins_with_what_its_reader_gets(page: str) -> None:
    title, _, rest = text_of(page).partition("\n\n")
    assert re.fullmatch("# .+", title), "one title"
    first = rest.partition("\n\n")[0]
    assert not first.startswith((" ", "#", "|", "-", "!", "```", "<!--")), "a sentence"
    assert len(first.split()) >= 8, "a sentence, not a word"


@pytest.mark.parametrize("page", [*PAGES, "../README.md", "../CONTRIBUTING.md", "../CHANGELOG.md", "../SECURITY.md"])
def test_a_link_leads_to_a_heading(page: str) -> None:
    path = DOCS / page
    for target, anchor in _LINK.findall(path.read_text(encoding="utf-8")):
        to = path if not target else path.parent / target
        assert to.exists(), target
        if anchor:
            assert anchor in anchors_of(to.read_text(encoding="utf-8")), f"{target}#{anchor}"


def test_a_page_leads_to_each_page() -> None:
    linked = {
        (DOCS / page).parent.joinpath(target).resolve() for page in PAGES for target, _ in _LINK.findall(text_of(page))
    }
    assert [page for page in PAGES if (DOCS / page).resolve() not in linked] == ["index.md"]


def test_links_between_the_root_and_docs_are_those_of_the_site() -> None:
    rewrite = hooks().with_links_of_site
    assert rewrite("[a](../SECURITY.md) [b](api.md#c)", "security.md") == "[a](SECURITY.md) [b](api.md#c)"
    assert rewrite("[a](docs/api.md#b)", "CHANGELOG.md") == "[a](api.md#b)"
    assert rewrite("[a](README.md#start)", "CONTRIBUTING.md") == "[a](index.md)"
    assert rewrite("[a](../../CONTRIBUTING.md)", "configuration/vllm.md") == "[a](../CONTRIBUTING.md)"
    assert rewrite("[a](https://docs.example/x.md)", "CHANGELOG.md") == "[a](https://docs.example/x.md)"


def test_the_generated_pages_are_current() -> None:
    from scripts.docs_pages import pages

    assert {name: text_of(name) for name in pages()} == pages(), "write them again: python -m scripts.docs_pages"
