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


OF_SERVER = ("frontend", "handlers", "lmi_server")
LIBRARIES = ("httptools", "msgspec", "prometheus_client", "pydantic", "rich", "starlette", "typer", "uvicorn", "uvloop")
NAMES = (*OF_SERVER, *LIBRARIES)


def _importing(*imports: str) -> str:
    return (
        "\n".join(imports)
        + """
from djl_python import Output
def handle(inputs):
    return None if inputs.is_empty() else Output().add(ANSWER)
"""
    )


def _answer(model: Path) -> str:
    with running(model) as server:
        server.log_line(r"\] (ready: process|.*could not be loaded)|could not be loaded")
        return str(server.http.post("/predictions/own", content=b"x").text)


def test_every_name_of_the_server_is_free_for_modules_beside_model_py(tmp_path: Path) -> None:
    imports = [f"import {name}\nassert {name}.__file__.startswith({str(tmp_path)!r}), {name}" for name in NAMES]
    own = make_own(
        tmp_path / "own", _importing(*imports, f"ANSWER = ' '.join(({', '.join(f'{name}.OWN' for name in NAMES)}))")
    )
    for name in NAMES:
        (own / f"{name}.py").write_text(f"OWN = {name!r}\n")
    assert _answer(own) == " ".join(NAMES)


@pytest.mark.parametrize("has_init", [True, False], ids=["package", "directory"])
def test_a_package_of_a_model_may_be_called_handlers(tmp_path: Path, has_init: bool) -> None:
    imports = (
        "import handlers.deep.inner",
        "from handlers.text import reverse",
        "ANSWER = reverse(handlers.deep.inner.TEXT)",
    )
    own = make_own(tmp_path / "own", _importing(*imports))
    (own / "handlers" / "deep").mkdir(parents=True)
    if has_init:
        (own / "handlers" / "__init__.py").write_text("from . import text\n")
        (own / "handlers" / "deep" / "__init__.py").write_text("")
    (own / "handlers" / "text.py").write_text("def reverse(text):\n    return text[::-1]\n")
    late = "def late():\n    import handlers.text as text\n    return text.reverse('abc')\n"
    (own / "handlers" / "deep" / "inner.py").write_text(f"import frontend\n{late}TEXT = late() + frontend.MORE\n")
    (own / "frontend.py").write_text("MORE = '!'\n")
    assert _answer(own) == "!abc"


@pytest.mark.parametrize("entry_point", ["handlers.py", "handlers.serve", "handlers"])
def test_an_entry_point_may_be_called_handlers(tmp_path: Path, entry_point: str) -> None:
    own = make_own(tmp_path / "own", "raise ImportError('not asked for')", entryPoint=entry_point)
    code = _importing("ANSWER = 'served by ' + __name__.partition('.')[2]")
    if entry_point == "handlers.serve":
        (own / "handlers").mkdir()
        (own / "handlers" / "serve.py").write_text(code)
    else:
        (own / "handlers.py").write_text(code)
    assert _answer(own) == ("served by serve" if entry_point == "handlers.serve" else "served by ")
