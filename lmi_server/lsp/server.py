"""The language server: passes documents and positions to the functions of this folder, and their answers to the editor.

Only this module imports pygls. A document is checked in a thread, a moment after the last key stroke. One check runs at
a time, and at most one of each document waits.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from lsprotocol import types
from pygls.lsp.server import LanguageServer
from pygls.uris import to_fs_path
from pygls.workspace import TextDocument

from lmi_server.explain.findings import Finding, Severity
from lmi_server.lsp import model_files, properties
from lmi_server.lsp.checked import Checked, Surroundings, check_text, is_model_file, is_properties
from lmi_server.lsp.offers import Offer, fix, lines_of

_DELAY = 0.25  # seconds without a key stroke before a document is checked
_MAX_FINDINGS = 500  # that an editor shows of one document
_LONGEST_TEXT = 2000  # characters of a finding
_SEVERITIES: dict[Severity, types.DiagnosticSeverity] = {
    "error": types.DiagnosticSeverity.Error,
    "warning": types.DiagnosticSeverity.Warning,
    "note": types.DiagnosticSeverity.Information,
}
_KINDS = {"key": types.CompletionItemKind.Property, "value": types.CompletionItemKind.EnumMember}
_SOURCE = "lmi-server"
_Answer = TypeVar("_Answer")


class Documents:
    """The open documents: what was found in each, and the check of it that waits."""

    def __init__(self, server: LanguageServer, around: Surroundings) -> None:
        self._server = server
        self._around = around
        self._checked: dict[str, Checked] = {}
        self._waiting: dict[str, asyncio.Task[None]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="check")

    def on_change(self, uri: str, delay: float = _DELAY) -> None:
        """Check the document soon, in place of a check that still waits."""
        self._stop(uri)
        self._waiting[uri] = asyncio.get_running_loop().create_task(self._check(uri, delay))

    def on_close(self, uri: str) -> None:
        """Forget the document, and take its findings from the editor."""
        self._stop(uri)
        self._checked.pop(uri, None)
        self._publish(uri, [])

    def end(self) -> None:
        """Stop every check that waits."""
        for uri in list(self._waiting):
            self._stop(uri)
        self._thread.shutdown(wait=False, cancel_futures=True)

    def complete(self, params: types.CompletionParams) -> list[types.CompletionItem]:
        """Return what may stand at a position."""
        document, position = self._document(params), params.position
        path, text = _path(document), document.source
        lines = lines_of(text)
        column = document.position_codec.position_from_client_units(lines, position).character
        if is_properties(path):
            offers = properties.completions(text, position.line, column, self._checked.get(document.uri, Checked()))
        elif is_model_file(path, text):
            offers = model_files.completions(text, position.line, column)
        else:
            offers = ()
        return [_completion(document, lines, position, offer) for offer in offers]

    async def hover(self, params: types.HoverParams) -> types.Hover | None:
        """Return what the key in a line means."""
        document, line = self._document(params), params.position.line
        path, text, checked = _path(document), document.source, self._checked.get(document.uri, Checked())
        if is_properties(path):
            shown = await self._in_thread(partial(properties.hover, path, text, line, checked, self._around))
        else:
            shown = model_files.hover(text, line, checked) if is_model_file(path, text) else None
        return None if shown is None else types.Hover(types.MarkupContent(types.MarkupKind.Markdown, shown))

    def fixes(self, params: types.CodeActionParams) -> list[types.CodeAction]:
        """Return the quick fixes for the lines of a range."""
        document, wanted = self._document(params), params.range
        lines = lines_of(document.source)
        actions = []
        for found in self._checked.get(document.uri, Checked()).findings:
            line = (found.line or 1) - 1
            if wanted.start.line <= line <= wanted.end.line and (edit := fix(found, lines)) is not None:
                place = _range(document, lines, line, edit.start, edit.end)
                change = types.WorkspaceEdit({document.uri: [types.TextEdit(place, edit.new)]})
                diagnostic = _diagnostic(document, lines, found)
                kind = types.CodeActionKind.QuickFix
                actions.append(types.CodeAction(edit.title, kind=kind, diagnostics=[diagnostic], edit=change))
        return actions

    def _document(self, params: Any) -> TextDocument:
        document: TextDocument = self._server.workspace.get_text_document(params.text_document.uri)
        return document

    async def _check(self, uri: str, delay: float) -> None:
        await asyncio.sleep(delay)
        document = self._server.workspace.get_text_document(uri)
        text = document.source
        checked = await self._in_thread(partial(check_text, _path(document), text, self._around))
        self._checked[uri] = checked
        self._waiting.pop(uri, None)
        lines = lines_of(text)
        shown = [_diagnostic(document, lines, found) for found in checked.findings[:_MAX_FINDINGS]]
        left = len(checked.findings) - len(shown)
        if left > 0:
            shown.append(_diagnostic(document, lines, Finding("warning", f"and {left} more, which the command shows")))
        self._publish(uri, shown)

    async def _in_thread(self, call: Callable[[], _Answer]) -> _Answer:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    def _publish(self, uri: str, shown: list[types.Diagnostic]) -> None:
        self._server.text_document_publish_diagnostics(types.PublishDiagnosticsParams(uri, shown))

    def _stop(self, uri: str) -> None:
        if (waiting := self._waiting.pop(uri, None)) is not None:
            waiting.cancel()


def _path(document: TextDocument) -> Path:
    return Path(to_fs_path(document.uri) or document.uri)


def _range(document: TextDocument, lines: Sequence[str], line: int, start: int, end: int) -> types.Range:
    places = types.Range(types.Position(line, start), types.Position(line, end))
    return document.position_codec.range_to_client_units(lines, places)


def _diagnostic(document: TextDocument, lines: Sequence[str], found: Finding) -> types.Diagnostic:
    """Return a finding in the protocol's form; one about another file or none stands in the first line."""
    line = min(max((found.line or 1) - 1, 0), len(lines) - 1)
    start = len(lines[line]) - len(lines[line].lstrip())
    place = _range(document, lines, line, start, len(lines[line]))
    text = found.text if len(found.text) <= _LONGEST_TEXT else f"{found.text[:_LONGEST_TEXT]}..."
    return types.Diagnostic(place, text, severity=_SEVERITIES[found.severity], source=_SOURCE)


def _completion(
    document: TextDocument, lines: Sequence[str], position: types.Position, offer: Offer
) -> types.CompletionItem:
    start = _range(document, lines, position.line, offer.start, offer.start).start
    edit = types.TextEdit(types.Range(start, position), offer.insert or offer.label)
    return types.CompletionItem(
        offer.label,
        kind=_KINDS[offer.kind],
        detail=offer.detail or None,
        documentation=types.MarkupContent(types.MarkupKind.Markdown, offer.text) if offer.text else None,
        deprecated=offer.deprecated or None,
        text_edit=edit,
    )


def make_server(around: Surroundings) -> LanguageServer:
    """Return the server, ready to be started."""
    server = LanguageServer(_SOURCE, version("lmi-server"))
    documents = Documents(server, around)
    triggers = types.CompletionOptions(trigger_characters=["=", ":", ".", " "])
    # pygls sets attributes of what it is given, and a bound method has none.
    server.feature(types.TEXT_DOCUMENT_DID_OPEN)(lambda params: documents.on_change(params.text_document.uri, 0))
    server.feature(types.TEXT_DOCUMENT_DID_CHANGE)(lambda params: documents.on_change(params.text_document.uri))
    server.feature(types.TEXT_DOCUMENT_DID_SAVE)(lambda params: documents.on_change(params.text_document.uri, 0))
    server.feature(types.TEXT_DOCUMENT_DID_CLOSE)(lambda params: documents.on_close(params.text_document.uri))
    server.feature(types.TEXT_DOCUMENT_COMPLETION, triggers)(partial(documents.complete))
    server.feature(types.TEXT_DOCUMENT_HOVER)(partial(documents.hover))
    fixes = types.CodeActionOptions([types.CodeActionKind.QuickFix])
    server.feature(types.TEXT_DOCUMENT_CODE_ACTION, fixes)(partial(documents.fixes))
    server.feature(types.SHUTDOWN)(lambda *_: documents.end())
    return server


def serve_stdio(around: Surroundings) -> None:
    """Serve one editor over standard input and output, until it ends."""
    output, sys.stdout = sys.stdout.buffer, sys.stderr  # what any library prints is no message of the protocol
    make_server(around).start_io(sys.stdin.buffer, output)
