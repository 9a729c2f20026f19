"""docs/configuration.md is what the declarations say today."""

from __future__ import annotations

from paths import ROOT

from lmi_server.configuration.handlers import HANDLERS, load_options_type
from lmi_server.configuration.options import ServingOptions
from lmi_server.explain.reference_page import reference_page

PAGE = ROOT / "docs" / "configuration.md"


def test_the_page_is_current() -> None:
    written = PAGE.read_text(encoding="utf-8")
    assert written == reference_page(), f"write it again: python -m lmi_server.explain.reference_page > {PAGE.name}"


def test_every_key_is_on_the_page() -> None:
    page = reference_page()
    for declaring in (ServingOptions, *(load_options_type(spec) for spec in HANDLERS.specs)):
        assert [option.key for option in declaring.declared() if f"| `{option.key}` |" not in page] == []
