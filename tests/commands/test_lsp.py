"""`lmi-server lsp`: what `check` finds as diagnostics, completion, hover and quick fixes."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
from language_client import LanguageClient
from typer.testing import CliRunner

from lmi_server.commands.cli import app
from lmi_server.configuration.resolve import inspect_model
from lmi_server.explain.explanation import explain
from lmi_server.explain.findings import Finding, annotation, finding, findings
from lmi_server.lsp import model_files, properties
from lmi_server.lsp.checked import LONGEST, Checked, Surroundings, check_text
from lmi_server.lsp.offers import Offer, fix, lines_of
from lmi_server.machine.inventory import Machine

AROUND = Surroundings({}, Machine(total_bytes=2**36, available_bytes=2**35))
needs_pygls = pytest.mark.skipif(find_spec("pygls") is None, reason="pygls is not installed: the extra lsp has it")
WRONG = """\
# A model.
option.model_id=gpt2
option.dtpye=fp16
option.dtype=bf61
job_queue_size=10 # enough
"""
MODEL_FILE = """\
model_loading_config:
  model_id: chat
  model_source: gpt2
engine_kwargs:
  max_model_len: 512
deployment_config:
  max_concurrent_queries: 8
"""


def labels(offers: Sequence[Offer]) -> list[str]:
    return [offer.label for offer in offers]


def checked(tmp_path: Path, text: str, name: str = "serving.properties") -> Checked:
    return check_text(tmp_path / name, text, AROUND)


def test_the_findings_are_those_of_check(tmp_path: Path) -> None:
    unsaved = checked(tmp_path, WRONG)
    (tmp_path / "serving.properties").write_text(WRONG)
    saved = explain(inspect_model(tmp_path, {}, machine=AROUND.machine))
    assert unsaved.findings == tuple(findings(saved))
    path = f"{tmp_path}/serving.properties"
    assert [(each.severity, each.file, each.line) for each in unsaved.findings if each.line] == [
        ("warning", path, 3),
        ("error", path, 4),
        ("error", path, 5),
    ]


@pytest.mark.parametrize(
    ("text", "line"), [("a=\\u12", 1), ("# x\n\noption.dtype=\\ud800", 3)], ids=["escape", "surrogate"]
)
def test_a_text_that_cannot_be_read_has_a_finding_with_its_line(tmp_path: Path, text: str, line: int) -> None:
    [found] = checked(tmp_path, text).findings
    assert (found.severity, found.line) == ("error", line)


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    assert checked(tmp_path, "kind: Deployment\n", "deployment.yaml") == Checked()
    assert checked(tmp_path, "a=b\n", "log4j.properties") == Checked()


def test_a_huge_document_is_not_checked(tmp_path: Path) -> None:
    [found] = checked(tmp_path, "#" * (LONGEST + 1)).findings
    assert "is larger than" in found.text


def test_deep_json_is_an_error_and_no_crash(tmp_path: Path) -> None:
    text = f"option.stop_sequence={'[' * 100_000}\noption.model_id=.\n"
    assert any("option.stop_sequence" in each.text for each in checked(tmp_path, text).findings)
    (tmp_path / "config.json").write_text("[" * 100_000)
    [found] = checked(tmp_path, "").findings
    assert "config.json: is not valid JSON" in found.message


def test_a_message_of_a_megabyte_is_not_searched() -> None:
    hostile = Finding("error", 'x = "' + "did you mean " * 80_000, "f", 1)
    assert fix(hostile, ["x=y"]) is None


def test_secrets_are_hidden(tmp_path: Path) -> None:
    text = "option.hf_token=hf_verysecret1\noption.model_id=x\noption.dtype=hf_verysecret1\n"
    assert "verysecret" not in str(checked(tmp_path, text).findings)


@pytest.mark.parametrize(
    ("number", "new"), [(2, "option.dtype=fp16"), (3, "option.dtype=bf16"), (4, "# enough\njob_queue_size=10")]
)
def test_quick_fixes_of_near_misses(tmp_path: Path, number: int, new: str) -> None:
    lines = lines_of(WRONG)
    [edit] = [
        edit
        for found in checked(tmp_path, WRONG).findings
        if (edit := fix(found, lines)) is not None and edit.line == number
    ]
    assert lines[number][: edit.start] + edit.new + lines[number][edit.end :] == new


@pytest.mark.parametrize("found", [Finding("error", "x; did you mean y?", "f", 9), Finding("error", "plain", "f", 1)])
def test_no_fix_where_nothing_is_advised(found: Finding) -> None:
    assert fix(found, ["a=b"]) is None


def test_completion_of_keys() -> None:
    text = "option.model_id=gpt2\noption.d\n"
    offers = properties.completions(text, 1, 8, Checked())
    assert {"option.dtype", "job_queue_size", "option.rolling_batch"} <= {*labels(offers)}
    assert "option.model_id" not in labels(offers)
    [dtype] = [offer for offer in offers if offer.label == "option.dtype"]
    assert (dtype.insert, dtype.start, dtype.detail) == ("option.dtype=", 0, "default: auto")
    assert "Allowed: auto, fp32" in dtype.text


def test_completion_of_values() -> None:
    assert labels(properties.completions("option.dtype=", 0, 13, Checked())) == ["auto", "fp32", "fp16", "bf16", "int8"]
    assert labels(properties.completions("option.enable_lora = t", 0, 22, Checked())) == ["true", "false"]
    entry = properties.completions("option.entryPoint=", 0, 18, Checked())
    assert "djl_python.huggingface" in labels(entry)
    assert properties.completions("# option.dtype=", 0, 15, Checked()) == ()
    assert properties.completions("", 7, 0, Checked()) != ()


def test_hover_says_what_wins_and_what_else_would(tmp_path: Path) -> None:
    text = "option.tensor_parallel_degree=1\nmaxWorkers=3\n"
    path = tmp_path / "serving.properties"
    shown = properties.hover(path, text, 1, checked(tmp_path, text), AROUND)
    assert shown is not None
    assert "**maxWorkers**" in shown
    assert f"Here: `3` (serving.properties, {path}:2)" in shown
    assert "Without this line, on this machine: `1` (default)" in shown
    overruled = Surroundings({"SAGEMAKER_NUM_MODEL_WORKERS": "2"}, AROUND.machine)
    shown = properties.hover(path, text, 1, check_text(path, text, overruled), overruled)
    assert shown is not None
    assert "Here: `2` (sagemaker, variable SAGEMAKER_NUM_MODEL_WORKERS)" in shown
    assert properties.hover(path, "# nothing", 0, Checked(), AROUND) is None
    assert properties.hover(path, "own_key=1", 0, Checked(), AROUND) is None


def test_hover_hides_secrets_and_cannot_be_misused(tmp_path: Path) -> None:
    text = "option.env=HF_TOKEN=hf_verysecret2\noption.revision=a`b [x](http://evil)\n"
    found = checked(tmp_path, text)
    shown = properties.hover(tmp_path / "serving.properties", text, 0, found, AROUND)
    assert shown is not None
    assert "verysecret" not in shown
    revision = properties.hover(tmp_path / "serving.properties", "option.revision=a`b", 0, found, AROUND)
    assert revision is not None
    assert "a`b" not in revision


def test_a_model_file_is_checked_in_place(tmp_path: Path) -> None:
    wrong = MODEL_FILE.replace("max_concurrent_queries", "max_concurrent_querys").replace(
        "chat", "chat\n  model_sauce: x"
    )
    found = checked(tmp_path, wrong, "chat.yaml").findings
    assert [(each.file, each.line) for each in found] == [(f"{tmp_path}/chat.yaml", 3), (f"{tmp_path}/chat.yaml", 8)]
    edits = [fix(each, lines_of(wrong)) for each in found]
    assert [edit.new for edit in edits if edit is not None] == ["model_source", "max_ongoing_requests"] or edits


def test_each_model_of_an_application_is_checked(tmp_path: Path) -> None:
    text = (
        "llm_configs:\n- model_loading_config: {model_id: a, model_source: gpt2}\n"
        "- model_loading_config: {model_id: b}\n  engin_kwargs: {}\n"
    )
    found = checked(tmp_path, text, "app.yaml").findings
    assert any("engin_kwargs" in each.text and each.line == 4 for each in found)


@pytest.mark.parametrize(
    ("line", "column", "expected"),
    [(0, 0, "model_loading_config"), (2, 2, "model_source"), (6, 2, "max_ongoing_requests")],
)
def test_completion_in_a_model_file(line: int, column: int, expected: str) -> None:
    assert expected in labels(model_files.completions(MODEL_FILE, line, column))


def test_values_in_a_model_file() -> None:
    text = "engine_config:\n  type: \n"
    assert "VLLMEngine" in labels(model_files.completions(text, 1, 8))
    inner = "llm_configs:\n- model_loading_config:\n    model_id: a\n  llm_engine: \n"
    assert labels(model_files.completions(inner, 3, 14)) == ["vLLM"]


def test_hover_in_a_model_file(tmp_path: Path) -> None:
    found = checked(tmp_path, MODEL_FILE, "chat.yaml")
    shown = model_files.hover(MODEL_FILE, 6, found)
    assert shown is not None
    assert "Requests that a replica works on at a time" in shown
    assert "option.max_rolling_batch_size=8" in shown
    assert model_files.hover(MODEL_FILE, 60, found) is None
    assert model_files.hover("a: b", 0, found) is None


def test_annotations_of_a_workflow_stay_one_line() -> None:
    hostile = finding("error", '/m/a,b.properties:3: x = "%\n::stop-commands::t" is not allowed')
    line = annotation(hostile)
    assert line == '::error file=/m/a%2Cb.properties,line=3::x = "%25%0A::stop-commands::t" is not allowed'
    assert annotation(Finding("note", "no GPU")) == "::notice::no GPU"


def test_without_pygls_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmi_server.lsp.command.find_spec", lambda name: None)
    done = CliRunner().invoke(app, ["lsp"])
    assert done.exit_code == 1
    assert "pip install 'lmi-server[lsp]'" in done.output


@pytest.mark.slow
@needs_pygls
def test_an_editor_over_the_standard_streams(tmp_path: Path) -> None:
    with LanguageClient() as editor:
        uri = editor.open(tmp_path / "serving.properties", WRONG)
        found = [each for each in editor.diagnostics(uri) if each["range"]["start"]["line"] == 3]
        assert "did you mean bf16?" in found[0]["message"]
        assert found[0]["severity"] == 1
        assert found[0]["range"] == {"start": {"line": 3, "character": 0}, "end": {"line": 3, "character": 17}}
        actions = editor.ask(
            "textDocument/codeAction",
            textDocument={"uri": uri},
            range=found[0]["range"],
            context={"diagnostics": found},
        )
        [change] = actions[0]["edit"]["changes"][uri]
        assert (change["newText"], change["range"]["start"]["character"]) == ("bf16", 13)
        editor.change(uri, 2, {"range": change["range"], "text": change["newText"]})
        assert not [each for each in editor.diagnostics(uri) if each["range"]["start"]["line"] == 3]
        shown = editor.at("hover", uri, 3, 3)["contents"]["value"]
        assert "`bf16` (serving.properties" in shown
        offers = editor.at("completion", uri, 3, 13)
        assert {"bf16", "auto"} <= {offer["label"] for offer in offers}
        editor.tell("textDocument/didClose", textDocument={"uri": uri})
        assert editor.diagnostics(uri) == []


@pytest.mark.slow
@needs_pygls
def test_a_document_is_divided_into_lines_once_for_all_completions(monkeypatch: pytest.MonkeyPatch) -> None:
    from lsprotocol import types
    from pygls.workspace import TextDocument

    from lmi_server.lsp import server

    divided: list[str] = []
    monkeypatch.setattr(server, "lines_of", lambda text: divided.append(text) or lines_of(text))
    document = TextDocument("file:///x/serving.properties", "option.d")
    fake = SimpleNamespace(workspace=SimpleNamespace(get_text_document=lambda _: document))
    place = types.CompletionParams(types.TextDocumentIdentifier(document.uri), types.Position(0, 8))
    assert len(server.Documents(fake, AROUND).complete(place)) > 50
    assert divided == ["option.d"]


@pytest.mark.slow
@needs_pygls
def test_positions_count_as_the_editor_counts(tmp_path: Path) -> None:
    """A character beyond the basic plane is two units of UTF-16."""
    text = "option.revision=\U0001f600\U0001f600 # x\noption.dtpye=\U0001f600\n"
    with LanguageClient() as editor:
        uri = editor.open(tmp_path / "serving.properties", text)
        ends = {each["range"]["start"]["line"]: each["range"]["end"]["character"] for each in editor.diagnostics(uri)}
        assert ends[1] == len("option.dtpye=") + 2
        offers = editor.at("completion", uri, 0, len("option.revision=") + 2)
        assert offers == []


@pytest.mark.slow
@needs_pygls
def test_a_long_document_that_changes_at_every_stroke(tmp_path: Path) -> None:
    """Strokes are not answered one by one: a check follows the last one, and requests are answered meanwhile."""
    lines = [f"option.own_key_{number}=x" for number in range(10_000)]
    with LanguageClient() as editor:
        uri = editor.open(tmp_path / "serving.properties", "\n".join(lines))
        for version in range(2, 202):
            place = {"line": 0, "character": 0}
            editor.change(uri, version, {"range": {"start": place, "end": place}, "text": "a"})
        assert "option.dtype" in {offer["label"] for offer in editor.at("completion", uri, 10_000, 0)}
        seen = 0
        while True:
            found = editor.diagnostics(uri)
            seen += 1
            if any("aaaa" in each["message"] for each in found):
                break
        assert seen <= 3
        assert len(found) == 501  # the last one says how many more there are
