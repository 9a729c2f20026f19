"""The way of a stranger: docs/start.md and docs/lora.md as they stand, and wrong keys mended by their messages.

The clone is one of this checkout, and `make run` finds the packages and the demo model of this checkout set up: what
`make setup` does has tests of its own. `my-model` and the adapters are tiny ones with random weights.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from literal_pages import blocks_of, reading
from paths import ROOT
from ports import reserved_port
from typer.testing import CliRunner

DEMO_MODEL = ROOT / "models" / "smollm2-135m-instruct"


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with what the pages suppose: a model and adapters."""
    from adapter_helpers import save_adapter
    from tiny_models import saved_model, tiny_model

    directory = tmp_path_factory.mktemp("files")
    model = tiny_model("llama")
    saved_model(model, directory / "my-model")
    for seed, name in enumerate(("my-french-adapter", "my-polite-adapter", "my-late-adapter")):
        save_adapter(model, directory / name, seed)
    return directory


def set_up(clone: Path, files: Path) -> None:
    """Give a clone the environment and the demo model of this checkout, as if they had just been made there."""
    for link, target in ((clone / "models", ROOT / "models"), (clone / "my-model", files / "my-model")):
        if not link.exists():
            link.symlink_to(target)
    environment = clone / ".venv"
    if (clone / "Makefile").exists() and not environment.exists():
        environment.mkdir()
        for entry in (ROOT / ".venv").iterdir():
            if not entry.name.startswith(".setup"):
                (environment / entry.name).symlink_to(entry)
        (environment / ".setup-run").touch()


@pytest.mark.slow
def test_a_stranger_gets_answers_from_a_clone_a_directory_and_lmis_keys(tmp_path: Path, files: Path) -> None:
    if not (DEMO_MODEL / "serving.properties").exists():
        pytest.skip("the demo model is not there; make demo-model builds it")
    with reserved_port() as port, reading(tmp_path, port, lambda where: set_up(where, files)) as reader:
        reader.follow(page("start.md"), {"<this repository>": str(ROOT)})


@pytest.mark.slow
def test_a_stranger_serves_adapters(tmp_path: Path, files: Path) -> None:
    shutil.copytree(files, tmp_path, dirs_exist_ok=True)
    with reserved_port() as port, reading(tmp_path, port) as reader:
        reader.follow(page("lora.md"))


# --- a reader of its own ---


@pytest.mark.slow
def test_a_page_that_prints_something_else_fails(tmp_path: Path) -> None:
    with reserved_port() as port, reading(tmp_path, port) as reader:
        reader.follow("```sh\nmkdir a\ncd a\necho 'one two' > b\n```\n\n```sh\ncat b\n```\n\n```text\none...\n```\n")
        with pytest.raises(AssertionError, match="no line 'three'"):
            reader.follow("```sh\necho four\n```\n```text\nthree\n```\n")
        with pytest.raises(AssertionError, match="exit 3"):
            reader.follow("```sh\nexit 3\n```\n")
        with pytest.raises(AssertionError, match="nothing-is-here"):
            reader.follow("```sh\nlmi-server serve nothing-is-here\n```\n")


def test_each_block_of_both_pages_is_followed() -> None:
    for name in ("start.md", "lora.md"):
        text = page(name)
        assert len(blocks_of(text)) * 2 == text.count("\n```"), f"{name} has a block that no test runs"
        assert "\n    " not in re.sub(r"```.*?```", "", text, flags=re.DOTALL), f"{name} has an indented block"


# --- a message is enough ---


def mended(line: str, message: str) -> str:
    """Return a line of serving.properties with what the message says done, and nothing else known."""
    if (meant := re.search(r"unknown key (\S+), .*did you mean ([\w.]+)\?", message)) is not None:
        return line.replace(meant[1], meant[2])
    said = re.search(r'(\S+) = "(.*)" is not allowed; allowed: (.*)', message)
    assert said is not None, f"says not what to do: {message}"
    key, value, allowed = said.groups()
    number = re.search(r"(?:an integer|a number) (?:of|from) (\d+)", allowed)
    new = number[1] if number else re.split(r"[, ]", allowed)[0]
    return line.replace(f"{key}={value}", f"{key}={new}")


@pytest.mark.parametrize(
    "line",
    [
        "option.max_rolling_batch_sise=8",
        "option.tensor_paralel_degree=1",
        "option.max_rolling_batch_size=lots",
        "option.max_rolling_batch_size=0",
        "option.dtype=bfloat",
        "option.rolling_batch=yes",
        "option.enable_lora=maybe",
        "batch_size=-1",
        "option.model_loading_timeout=soon",
    ],
)
def test_a_wrong_line_is_mended_by_its_message_alone(line: str, tmp_path: Path) -> None:
    from lmi_server.commands.cli import app

    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}')
    file = tmp_path / "serving.properties"

    def messages() -> list[str]:
        file.write_text(f"engine=Python\n{line}\n")
        said = CliRunner().invoke(app, ["check", str(tmp_path)]).output.splitlines()
        return [each for each in said if f"{file}:2: " in each]

    [message] = messages()
    line = mended(line, message)
    assert messages() == []
