"""Every snippet of docs/ and README.md is checked: commands, options, extras, targets, paths, keys, Python, YAML, JSON.

Tests of their own run some pages as they stand: docs/start.md, lora.md, clients.md, sagemaker.md, CONTRIBUTING.md.
Here the program is asked whether what the other pages name is there. A command of another program needs that program,
and its page says so before the first such command.
"""

from __future__ import annotations

import ast
import configparser
import importlib.util
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import typer
import yaml
from paths import ROOT

from lmi_server.commands.cli import app
from lmi_server.configuration.handlers import HANDLERS, load_options_type
from lmi_server.configuration.options import ServingOptions
from lmi_server.configuration.server_settings import ServerSettings

PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
# Commands of other programs, and what says in the text that the reader needs them.
FOREIGN = {
    "docker": "docker|image|container",
    "kubectl": "cluster",
    "helm": "Helm",
    "aws": "SageMaker|AWS",
    "systemctl": "systemd",
    "journalctl": "systemd",
    "install": "systemd",
    "serve": "Ray",
    "ray": "Ray",
    "vllm": "vLLM",
    "uvx": "uv",
    "py-spy": "py-spy",
    "lm_eval": "lm-eval",
}
PLAIN = {
    "mkdir",
    "cd",
    "cp",
    "mv",
    "cat",
    "sed",
    "source",
    "tar",
    "git",
    "python3.11",
    "python3",
    "export",
    "openssl",
    "printf",
    "echo",
    "for",
    "done",
}
COMMANDS = {"lmi-server", "make", "pip", "curl", "python", ".venv/bin/python", *FOREIGN, *PLAIN}

_VARIABLE = re.compile(r"[A-Z]\w*=\S*")
_ELLIPSIS = re.compile(r"\.\.\.|…|\b[A-Z]{2,}\b")


@dataclass(frozen=True)
class Snippet:
    """A block of code: its page, its first line there, the language of its fence, and the text above it."""

    page: str
    line: int
    language: str
    code: str
    before: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def snippets_of(text: str, page: str) -> Iterator[Snippet]:
    """Yield fenced blocks and blocks that are indented by four spaces."""
    lines = text.split("\n")
    number = 0
    while number < len(lines):
        line, start = lines[number], number
        if line.startswith("```"):
            number = lines.index("```", start + 1)
            inner = lines[start + 1 : number]
            yield Snippet(page, start + 1, line[3:].strip(), "\n".join(inner), "\n".join(lines[:start]))
        elif line.startswith("    ") and (start == 0 or not lines[start - 1].strip()):
            while number + 1 < len(lines) and (lines[number + 1].startswith("    ") or not lines[number + 1].strip()):
                number += 1
            inner = [each[4:] for each in lines[start : number + 1]]
            yield Snippet(page, start + 1, "", "\n".join(inner).rstrip(), "\n".join(lines[:start]))
        number += 1


SNIPPETS = [
    pytest.param(snippet, id=str(snippet))
    for path in PAGES
    for snippet in snippets_of(path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix())
]


def kind_of(snippet: Snippet) -> str:
    if snippet.language:
        return snippet.language
    code = snippet.code.lstrip()
    first = next((line for line in code.splitlines() if line and not line.startswith("#")), "")
    if "+--" in code:
        return "text"  # a picture
    words = first.split()
    while words and _VARIABLE.fullmatch(words[0]):
        words.pop(0)
    if (words and words[0] in COMMANDS) or re.match(r"[A-Z][A-Z0-9_]*=", first):
        return "sh"
    if re.match(r"(from|import|def|async def|class|@)\b", first):
        return "python"
    if first.startswith("{"):
        return "json"
    if re.fullmatch(r"(option\.)?[\w.]+=.*", first):
        return "properties"
    if re.fullmatch(r"[\w.]+:( .*)?|- .*", first):
        return "yaml"
    return "text"


# --- commands ---


def check_lmi_server(words: list[str]) -> None:
    """Check that commands and options are there."""
    command = typer.main.get_command(app)
    words = [word.strip("[]") for word in words]  # of what may be left out
    while words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words.pop(0)]
    known = {name for each in command.params for name in (*each.opts, *each.secondary_opts)} | {"--help", "-h"}
    if hasattr(command, "commands"):
        known.add("--version")
        assert not words or words[0] in known, f"no command {words[0]}"
    for word in words:
        if word.startswith("-"):
            assert word.partition("=")[0] in known, f"no option {word}"


def check_pip(words: list[str]) -> None:
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    for word in words:
        found = re.search(r"(?:lmi-server|checkout|\.)\[([\w,-]+)\]", word)
        if found is not None:
            assert set(found[1].split(",")) <= settings["options.extras_require"].keys(), word


def check_make(words: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = [word for word in words if "=" not in word]
    assert targets
    for target in targets:
        assert re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE), f"no target {target}"


def check_python(words: list[str]) -> None:
    if words[:1] == ["-m"]:
        assert words[1] in ("venv", "pip", "pytest") or importlib.util.find_spec(words[1]), words[1]
    elif words and words[0].endswith(".py") and "/" in words[0]:
        assert (ROOT / words[0]).exists(), words[0]


def check_curl(words: list[str]) -> None:
    urls = [re.sub(r"\$\w+", "x", word) for word in words if re.match(r"(http://)?(localhost|127\.0\.0\.1)[:/]", word)]
    for url in urls:
        path = re.sub(r"^(http://)?[^/]+", "", url).partition("?")[0]
        if path:
            assert any(re.fullmatch(known, path) for known in routes()), f"no path {path}"


def routes() -> list[str]:
    """Return patterns of the paths that docs/api.md lists."""
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    paths = re.findall(r"(/[\w{}/.:*-]+)", text)
    return [re.sub(r"\\\{[^}]*\\\}", "[^/]+", re.escape(path)) for path in paths] + ["/models/.+", "/predictions/.+"]


CHECKS = {
    "lmi-server": check_lmi_server,
    "pip": check_pip,
    "/opt/lmi-server/.venv/bin/pip": check_pip,
    "make": check_make,
    "python": check_python,
    ".venv/bin/python": check_python,
    "curl": check_curl,
}


def lines_of(code: str) -> Iterator[str]:
    """Yield the commands of a block: without comments and here-documents, continued lines as one."""
    code = re.sub(r"<<-?'?(\w+)'?\n.*?^\1$", "", code, flags=re.MULTILINE | re.DOTALL)
    command = ""
    for line in re.sub(r"\\\n\s*", " ", code).splitlines():
        if not command and (not line.strip() or line.lstrip().startswith("#")):
            continue
        command += line + "\n"
        if command.count("'") % 2 == 0:  # a text in quotes may have lines of its own
            yield command.strip()
            command = ""


def check_shell(snippet: Snippet) -> None:
    for line in lines_of(snippet.code):
        for part in re.split(r"\s(?:&&|\||;)\s", re.sub(r"\s[12]?>.*$", "", line)):
            words = shlex.split(part, comments=True)
            while words and _VARIABLE.fullmatch(words[0]):
                words.pop(0)
            if not words:
                continue
            name, *rest = words
            if name in CHECKS:
                CHECKS[name](rest)
            elif name in FOREIGN:
                assert re.search(FOREIGN[name], snippet.before), f"the page does not say that {name} needs something"
            else:
                assert name in PLAIN or name in COMMANDS, f"unknown command {name}"


# --- files ---


def known_keys() -> set[str]:
    types = (ServingOptions, *(load_options_type(spec) for spec in HANDLERS.specs), ServerSettings)
    options = [option for declaring in types for option in declaring.declared_options()]
    return {name for option in options for name in (option.key, *option.aliases)}


def check_properties(snippet: Snippet) -> None:
    pairs = [line.partition("=") for line in snippet.code.splitlines() if "=" in line and not line.startswith("#")]
    wrong = [key for key, _, _ in pairs if re.fullmatch(r"[\w.]+", key) and key.strip() not in known_keys()]
    assert wrong == [], "no such keys"


def check_json(snippet: Snippet) -> None:
    if _ELLIPSIS.search(snippet.code):
        return  # it says itself that it is not whole
    decoder, rest = json.JSONDecoder(), snippet.code.strip()
    while rest:
        _, end = decoder.raw_decode(rest)
        rest = rest[end:].lstrip()


def check_python_code(snippet: Snippet) -> None:
    ast.parse(snippet.code)


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_a_snippet_names_what_is_there(snippet: Snippet) -> None:
    match kind_of(snippet):
        case "sh":
            check_shell(snippet)
        case "python":
            check_python_code(snippet)
        case "properties":
            check_properties(snippet)
        case "yaml":
            yaml.safe_load(snippet.code)
        case "json":
            check_json(snippet)


@pytest.mark.parametrize(
    "code",
    [
        "lmi-server sreve DIR",
        "lmi-server serve DIR --prot 8080",
        "pip install 'lmi-server[huggingfaec]'",
        "make rnu",
        "python -m benchmarks.nothing",
        "curl localhost:8080/v1/compltions",
        "kubectl apply -f x.yaml",
        "option.max_rolling_batch_sise=8",
        "def f(:",
        '{"inputs": }',
    ],
)
def test_a_wrong_snippet_is_found(code: str) -> None:
    [snippet] = snippets_of(f"Text.\n\n    {code}\n", "page")
    with pytest.raises((AssertionError, ValueError, SyntaxError)):
        test_a_snippet_names_what_is_there(snippet)
