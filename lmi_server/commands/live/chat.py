"""`lmi-server chat`: a chat with a model in the terminal, on a running server or on one that is started for it."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lmi_server.artifacts.fetch import artifact_settings
from lmi_server.client.server_calls import DEFAULT_URL, Headers, ServerCalls, parse_headers
from lmi_server.client.terminal import plain_configuration_errors
from lmi_server.client.trial_server import LoadFailedError, trial_server
from lmi_server.commands.live.conversation import LiveConversation
from lmi_server.contract.errors import ConfigurationError
from lmi_server.contract.texts.secrets import SECRETS
from lmi_server.files.whole_files import write_text
from lmi_server.machine.environment import process_environment
from lmi_server.serving.models.model_store import name_of

_URL = re.compile(r"https?://.*|(\[[\da-fA-F:.]+\]|[\w.-]+):\d+(/.*)?", re.ASCII)
_PROMPT = "> "
_MORE = ". "
_QUOTES = '"""'
_MAX_LINES = 1000  # of the history

_HELP = '''/help                 this list
/system [TEXT]        the system prompt; without a text, none
/set [NAME VALUE]     a parameter of the requests, such as /set temperature 0.2; without a value, the server's default
/model [NAME]         talk to another model of the server; without a name, list them
/reset                forget what was said
/save FILE            write the chat as the JSON body of a request
/exit                 end, as Ctrl-D does
"""                   begins and ends a message of several lines
Ctrl-C                ends the answer, not the chat'''


def chat(
    target: Annotated[
        str,
        typer.Argument(
            metavar="[URL|MODEL]",
            help="A running server, or a model (a directory, a file, OWNER/NAME) for which a server is started.",
        ),
    ] = DEFAULT_URL,
    model: Annotated[str | None, typer.Option(help="Name of the model; the first of the server by default.")] = None,
    system: Annotated[str, typer.Option(help="System prompt.")] = "",
    parameters: Annotated[
        list[str] | None, typer.Option("--set", help="A parameter of the requests: temperature=0.2.")
    ] = None,
    header: Headers = None,
) -> None:
    """Chat with a model: each line is a message, and /help lists the commands. Lines may come from a pipe."""
    with plain_configuration_errors(), contextlib.suppress(KeyboardInterrupt), _server(target, header or []) as server:
        conversation = LiveConversation(server, model)
        conversation.system = system
        for each in parameters or ():
            name, separator, text = each.partition("=")
            if not (name and separator):
                raise ConfigurationError(f'--set "{each}" is not allowed; allowed: name=value')
            conversation.set(name, text)
        is_whole = _ChatSession(conversation).run()
        raise typer.Exit(0 if is_whole else 1)


@contextlib.contextmanager
def _server(target: str, headers: list[str]) -> Iterator[ServerCalls]:
    """Yield the server at a URL, or one that is started for a model and ends with the chat."""
    given = dict(parse_headers(headers))
    if _URL.fullmatch(target) is not None and not os.path.exists(target):
        yield ServerCalls(target, given)
        return
    model = str(Path(target).absolute()) if os.path.exists(target) else target
    waiting = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="lmi-server-chat-") as directory:
        with waiting.status(f"loading {target}"), contextlib.ExitStack() as stack:
            server = stack.enter_context(trial_server(Path(directory, "server.log")))
            try:
                server.load(model, {}, None, name_of(model))
            except LoadFailedError as error:
                raise ConfigurationError(f"{target}: {error}") from error
            running = stack.pop_all()
        with running:
            yield ServerCalls(server.url, given)


class _ChatSession:
    """Reads lines, and shows what the model answers. At a terminal there are prompts, a history and notes."""

    def __init__(self, conversation: LiveConversation) -> None:
        self._conversation = conversation
        self._at_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        self._notes = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
        self._commands: Mapping[str, Callable[[str], None]] = {
            "help": lambda _: print(_HELP),
            "system": self._set_system,
            "set": self._set,
            "model": self._choose_model,
            "reset": lambda _: conversation.reset(),
            "save": self._save,
        }

    def run(self) -> bool:
        """Chat until the end of the input; return whether everything was answered, always True at a terminal."""
        if self._at_terminal:
            self._notes.print(f"{self._conversation.model}: /help lists the commands, Ctrl-D ends", style="dim")
        is_whole = True
        with _history() if self._at_terminal else contextlib.nullcontext():
            for text in self._messages():
                if text in ("/exit", "/quit", "/bye"):
                    break
                try:
                    self._do(text)
                except ConfigurationError as error:
                    self._notes.print(SECRETS.mask(error.message), style="red")
                    is_whole = self._at_terminal
        return is_whole

    def _messages(self) -> Iterator[str]:
        """Yield what is typed, a line or several in quotes, until the end of the input."""
        while True:
            try:
                text = self._line(_PROMPT)
                if text.startswith(_QUOTES):
                    text = self._read_quoted(text.removeprefix(_QUOTES))
            except EOFError:
                return
            except KeyboardInterrupt:
                print()
                self._notes.print("Ctrl-D or /exit ends", style="dim")
                continue
            if text.strip():
                yield text.strip()

    def _line(self, prompt: str) -> str:
        return input(prompt if self._at_terminal else "")

    def _read_quoted(self, first: str) -> str:
        lines = [first]
        while not lines[-1].rstrip().endswith(_QUOTES):
            lines.append(self._line(_MORE))
        return "\n".join(lines).rstrip().removesuffix(_QUOTES)

    def _do(self, text: str) -> None:
        if not text.startswith("/"):
            self._answer(text)
            return
        name, _, rest = text[1:].partition(" ")
        command = self._commands.get(name)
        if command is None:
            raise ConfigurationError(f"/{name} is no command; /help lists them")
        command(rest.strip())

    def _answer(self, text: str) -> None:
        began = time.monotonic()
        first_s = None
        answer = self._conversation.ask(text)
        try:
            for piece in answer:
                first_s = time.monotonic() - began if first_s is None else first_s
                print(piece, end="", flush=True)
            print()
        except KeyboardInterrupt:
            print()
            self._notes.print("ended", style="dim")
            if not self._at_terminal:
                raise
        finally:
            answer.close()  # so that the connection is closed, and the server drops the request
        tokens = self._conversation.usage.get("completion_tokens")
        if self._at_terminal and tokens and first_s is not None:
            spent = time.monotonic() - began
            rate = f", {(tokens - 1) / (spent - first_s):.1f} tokens/s" if tokens > 1 and spent > first_s else ""
            self._notes.print(f"{tokens} tokens, the first after {first_s:.2f} s{rate}", style="dim")

    # --- commands ---

    def _note(self, text: str) -> None:
        if self._at_terminal:
            self._notes.print(text, style="dim")

    def _set_system(self, text: str) -> None:
        self._conversation.system = text
        self._note("system prompt set" if text else "no system prompt")

    def _set(self, text: str) -> None:
        name, _, value = text.partition(" ")
        if name:
            self._conversation.set(name, value.strip())
        for key, each in self._conversation.parameters.items():
            self._note(f"{key} = {each}")

    def _choose_model(self, text: str) -> None:
        if text:
            self._conversation.model = self._conversation.find_model(text)
            self._note(f"now {text}")
            return
        for name in self._conversation.models():
            print(f"{'*' if name == self._conversation.model else ' '} {name}")

    def _save(self, text: str) -> None:
        if not text:
            raise ConfigurationError("/save needs the name of a file")
        write_text(Path(text).expanduser(), self._conversation.as_json())
        self._note(f"written to {text}")


@contextlib.contextmanager
def _history() -> Iterator[None]:
    """Have `input` edit lines and keep a history, across chats if there is a home directory."""
    try:
        import readline
    except ImportError:  # a Python that was built without it
        yield
        return
    path = artifact_settings(None, process_environment()).root / "chat-history"
    with contextlib.suppress(OSError):
        readline.read_history_file(path)
    readline.set_history_length(_MAX_LINES)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(0o600)
            readline.write_history_file(path)
