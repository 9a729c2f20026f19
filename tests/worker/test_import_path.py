"""Which directories workers import from: not the working directory, and that of the model only for its own code."""

from __future__ import annotations

from pathlib import Path

import pytest
from own_code_helpers import make_own
from server_helpers import make_model, request, running

TRAPS = ("random.py", "selectors.py", "msgspec.py", "uvloop.py", "sitecustomize.py")
CODE = """
import sibling
from djl_python import Output
def handle(inputs):
    return None if inputs.is_empty() else Output().add(sibling.ANSWER)
"""


def test_files_beside_weights_do_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also not if the server was started in that directory."""
    model = make_model(tmp_path / "model")
    for name in TRAPS:
        trap = f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r})\nraise ImportError('it ran')\n"
        (model / name).write_text(trap)
    own = make_own(tmp_path / "own", CODE)
    (own / "sibling.py").write_text("ANSWER = 'from beside model.py'")
    monkeypatch.chdir(model)
    with running(model, own) as server:
        for _ in range(2):
            server.log_line(r"\] (ready: process|.*could not be loaded)|could not be loaded")
        assert server.http.post("/predictions/model", json=request("a")).status_code == 200
        assert server.http.post("/predictions/own", content=b"x").text == "from beside model.py"
    assert not (tmp_path / "ran").exists(), (tmp_path / "ran").read_text()
