"""Hooks of mkdocs.yml: documents in the root of the project become pages, and links between them and docs/ hold."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
IN_ROOT = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
WORKER = "assets/iframe-worker.js"  # by this name the plugin `offline` knows that it need not fetch one

_LINK = re.compile(r"\]\((?:\.\./)*(docs/)?([\w./-]+\.md)(#[\w-]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the documents in the root to the pages, and the script that makes the search work without a server."""
    from mkdocs.structure.files import File

    for name in IN_ROOT:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    files.append(File.generated(config, WORKER, abs_src_path=str(Path(__file__).with_name("worker.js"))))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the text of a page, with links as the site has them."""
    return with_links_of_site(markdown, page.file.src_uri)


def with_links_of_site(markdown: str, source: str) -> str:
    """Return a page whose links between docs/ and the root of the project lead to pages of the site."""

    def rewritten(match: re.Match[str]) -> str:
        _, target, anchor = match.groups()
        if target == "README.md":
            return "](index.md)"
        if source in IN_ROOT or target in IN_ROOT:
            return f"]({'../' * source.count('/')}{target}{anchor or ''})"
        return match[0]

    return _LINK.sub(rewritten, markdown)
