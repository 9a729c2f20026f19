"""Has the processes of pytest-xdist send what is shown alone: each message takes both sides some of a processor's time.

Otherwise a test is six of them, most with all names and marks of the test: about a millisecond in all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

# Options whose output is made of what is left out.
_DETAILED = ("verbose", "durations", "xmlpath", "cpu_times", "setupshow")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Leave out starts, ends, and the set-ups and ends of fixtures that passed, unless an option shows them.

    The end of a fixture that printed something is sent: it may be the log of what a test that failed used.
    """
    if not hasattr(config, "workerinput") or any(getattr(config.option, name, None) for name in _DETAILED):
        return
    for plugin in config.pluginmanager.get_plugins():
        if hasattr(plugin, "sendevent"):
            plugin.sendevent = _Shown(plugin.sendevent)
    config.pluginmanager.unregister(name="terminalreporter")  # which writes to /dev/null


class _Shown:
    """Sends the events of pytest-xdist's name that its other side needs."""

    def __init__(self, send: Any) -> None:
        self._send = send

    def __call__(self, name: str, **event: Any) -> None:
        if name in ("logstart", "logfinish"):
            return
        report = event.get("data", {}) if name == "testreport" else {}
        if report.get("outcome") != "passed" or report["when"] == "call" or _prints_at_its_end(report):
            self._send(name, **event)


def _prints_at_its_end(report: Mapping[str, Any]) -> bool:
    """Return whether the output of an end is in a report; that of a set-up is in the report of the call, too."""
    return any(title.endswith(" teardown") for title, _ in report["sections"])
