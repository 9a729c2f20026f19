"""`lmi-server tune`: real trials of the echo model on a real server, and the search itself."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import resource
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest
from forked_servers import ForkedCommand, run_command
from paths import ROOT
from processes import children, is_running
from waiting import wait_until

from lmi_server.bench.reports.page import markdown
from lmi_server.contract.errors import ConfigurationError
from lmi_server.machine.ports import free_port
from lmi_server.processes.usage import find_listener
from lmi_server.tune.adapter_costs import Cost
from lmi_server.tune.confirmation import Confirmation, candidate_of, choose, confirm
from lmi_server.tune.measurement import Limits
from lmi_server.tune.merging import merge
from lmi_server.tune.outcome import Outcome, TuneTrial, best_of, pareto
from lmi_server.tune.report import SearchResult, next_steps, sections
from lmi_server.tune.result import difference, tuned_properties
from lmi_server.tune.space import Choices, Range, Space, check_space, grid, parse_space, size_of, space_of_script

if TYPE_CHECKING:
    from lmi_server.client.trial_server import TrialServer
    from lmi_server.tune.search import Search

# Each token takes 4 ms, so the throughput follows from the number of requests at a time.
PROPERTIES = "option.entryPoint=djl_python.echo\n# at a time\noption.max_rolling_batch_size=2\noption.echo_delay_ms=4\n"
TRAFFIC = ("--concurrency", "8", "--requests", "16", "--input-tokens", "3", "--output-tokens", "5")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "serving.properties").write_text(PROPERTIES)
    return directory


def tune(model: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables, "COLUMNS": "200"}
    return run_command("tune", str(model), *TRAFFIC, *arguments, env=environment, cwd=model.parent, libraries="tune")


@pytest.mark.slow
def test_the_best_setting_is_found_and_written_on_request(model: Path) -> None:
    properties = PROPERTIES.replace("delay_ms=4", "delay_ms=20")  # far longer than a busy machine takes for a token
    (model / "serving.properties").write_text(properties)
    arguments = ("--option", "max_rolling_batch_size=1,8", "--option", "pythonExecutable=nowhere,python3")
    done = tune(model, *arguments, "--grid", "--confirm", "2", "--json", "found.json")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads((model.parent / "found.json").read_text())
    trials = {tuple(trial["settings"].values()): trial for trial in found["trials"]}
    assert set(trials) == {(), ("1", "python3"), ("8", "python3"), ("1", "nowhere"), ("8", "nowhere")}
    assert "nowhere" in trials["8", "nowhere"]["reason"]
    assert trials["8", "nowhere"]["output_tokens_per_s"] is None
    best = next(trial for trial in found["trials"] if trial["number"] == found["best"])
    assert best["settings"] == {"option.max_rolling_batch_size": "8", "option.pythonExecutable": "python3"}
    assert best["output_tokens_per_s"] > 2 * trials[()]["output_tokens_per_s"]
    assert found["confirmation"]["trial"] == best["number"]
    assert found["confirmation"]["is_better"]
    assert len(found["confirmation"]["output_tokens_per_s"]) == 2
    assert "In 2 pairs of runs in turns, max_rolling_batch_size=8, pythonExecutable=python3 gives " in done.stdout
    assert "+option.max_rolling_batch_size=8" in done.stdout
    assert (model / "serving.properties").read_text() == properties
    again = tune(model, *arguments, "--grid", "--confirm", "2", "--apply", "--report", "report.md")
    assert "trial 0" not in again.stdout.split("none is both")[0]  # nothing was tried again
    lines = (model / "serving.properties").read_text().splitlines()
    assert lines[1] == "# at a time"
    assert lines[2].startswith("# lmi-server tune: trial ")
    assert lines[2].endswith(" times that in 2 pairs)")
    assert lines[3] == "option.max_rolling_batch_size=8"
    assert f"gives {found['confirmation']['ratio']:.3f} times" in (model.parent / "report.md").read_text()  # not again


@pytest.mark.slow
def test_limits_lower_the_traffic_until_it_keeps_them(model: Path) -> None:
    """Here not even one request at a time does."""
    arguments = ("--max-p99-e2el", "0.1ms", "--trials", "0", "--json", "found.json")
    done = tune(model, "--option", "max_rolling_batch_size=1,2", *arguments)
    assert done.returncode == 1
    [trial] = json.loads((model.parent / "found.json").read_text())["trials"]
    assert (trial["concurrency"], trial["figures"]["requests"]) == (1, 16), "the number of requests stays"
    assert "as it is: p99 of e2el is " in done.stdout
    assert "No setting keeps the limits" in done.stdout


@pytest.mark.slow
def test_goodput_counts_the_requests_that_keep_the_limits(model: Path) -> None:
    """The script's share of a prefix that is the same is no limit: nothing of it has to be in a cache."""
    arguments = ("--objective", "goodput", "--max-p99-e2el", "60s", "--trials", "0", "--json", "found.json")
    done = tune(model, "--option", "max_rolling_batch_size=1,2", *arguments, MIN_CACHE_HIT_PCT="30")
    assert (done.returncode, done.stderr) == (0, "")
    assert " good requests/s at 8 requests" in done.stdout
    [trial] = json.loads((model.parent / "found.json").read_text())["trials"]
    assert trial["goodput_per_s"] == trial["figures"]["requests_per_s"] > 0
    again = tune(model, "--option", "max_rolling_batch_size=1,2", *arguments, "--shared-prefix", "0.3")
    assert "as it is: " not in again.stdout, "it is the same search"


@pytest.mark.slow
def test_a_search_goes_on_after_it_was_killed(model: Path) -> None:
    values = ",".join(map(str, range(1, 9)))
    arguments = [f"max_rolling_batch_size={values}", "--trials", "8", "--requests", "64"]
    process = ForkedCommand(
        ["tune", str(model), *TRAFFIC, "--option", *arguments], os.environ, model.parent, libraries="tune"
    )
    before = [process.stdout.readline(), process.stdout.readline()]
    assert before[0].startswith("as it is: ")
    server = children(process.pid)[0]
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    process.stderr.close()
    wait_until(lambda: not is_running(server), "no server is left behind")
    done = tune(model, "--option", arguments[0], "--trials", "2", "--requests", "64", "--confirm", "0")
    assert done.returncode == 0
    assert "as it is: " not in done.stdout.split("none is both")[0]
    assert len([line for line in done.stdout.splitlines() if line.startswith("trial ")]) == 1


@pytest.mark.slow
def test_a_port_that_is_taken_and_a_server_that_is_killed_cost_one_trial(model: Path) -> None:
    """Who has the port answers as a server would."""
    from lmi_server.bench.command import bench_target
    from lmi_server.bench.workload import RandomPrompts
    from lmi_server.client.trial_server import MODEL, trial_server
    from lmi_server.tune.measurement import Measurement, Traffic

    answer = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
    target = bench_target("http://127.0.0.1:1", "completions", MODEL, True, ())
    traffic = Traffic(target, RandomPrompts(3, 5), {}, 4, 2, 0)
    pids = []
    with always_answering(answer) as taken, contextlib.ExitStack() as servers:
        ports = iter([taken, free_port(None), free_port(None)])

        def start() -> TrialServer:
            server = servers.enter_context(trial_server(model.parent / "log", lambda: next(ports)))
            pids.append(find_listener("127.0.0.1", urlsplit(server.url).port or 0) or 0)
            return server

        measure = Measurement(str(model), traffic, Limits({}), 60, start)
        os.kill(pids[0], signal.SIGKILL)
        outcome = measure({}, 0.0)  # with the server that died, or the one in its place
        assert outcome.value or "does not answer" in outcome.reason
        # Its socket closes some time before all of its threads have ended.
        wait_until(lambda: measure({}, 0.0).value is not None, "a server in its place")
    assert len(pids) == 2
    assert all(not is_running(pid) for pid in pids)


@contextlib.contextmanager
def always_answering(answer: bytes) -> Iterator[int]:
    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listening.accept()
                with connection:
                    connection.recv(65536)
                    connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve)
        thread.start()
        yield listening.getsockname()[1]
        listening.shutdown(socket.SHUT_RDWR)
    thread.join(60)


@pytest.mark.slow
def test_adapters_are_in_the_traffic_and_the_report_has_what_they_cost(model: Path) -> None:
    """The echo handler takes any adapter; there is no checkpoint to merge one into."""
    with (model / "serving.properties").open("a") as file:
        file.write("option.enable_lora=true\n")
    for name in ("french", "german"):
        (model / "adapters" / name).mkdir(parents=True)
    arguments = ("--option", "max_rolling_batch_size=8", "--adapters", "base=1,french=3", "--report", "report.html")
    done = tune(model, *arguments, "--confirm", "2", "--json", "found.json")
    assert (done.returncode, done.stderr) == (0, "")
    base, one, every, merged = json.loads((model.parent / "found.json").read_text())["adapter_costs"]
    assert [cost["traffic"] for cost in (base, one, every)] == ["base", "one adapter, french", "all, by their weights"]
    assert all(cost["prefill_ms"] > 0 and cost["decode_ms"] > 0 for cost in (base, one, every))
    assert one["load_s"] > 0
    assert merged["reason"].startswith("only a checkpoint and an adapter of peft")
    page = (model.parent / "report.html").read_text()
    assert "What adapters cost" in page
    assert "adapters that were not in the traffic (german)" in page
    assert "+option.max_rolling_batch_size=8" in page
    assert '"title": "p99 end to end, by throughput"' in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to try: give --option NAME=VALUES"),
        (
            ["--option", "max_rolling_batch_size"],
            '--option "max_rolling_batch_size" is not allowed; allowed: NAME=8,16',
        ),
        (["--option", "max_rolling_batch_sise=1"], "did you mean option.max_rolling_batch_size?"),
        (["--option", "max_rolling_batch_size=many"], 'max_rolling_batch_size = "many"'),
        (["--option", "quantize=awq"], "option.quantize has no effect on echo"),
        (["--option", "required_memory_mb=1"], "--option required_memory_mb cannot be tried; of the keys of the"),
        (["--option", "a=2:1"], '--option "a=2:1" is not allowed'),
        (["--option", "echo_delay_ms=0:1", "--grid"], "--grid needs a step for the range of option.echo_delay_ms"),
        (["--option", "echo_delay_ms=1", "--max-p99-ttft", "soon"], '--max-p99-ttft "soon" is not allowed'),
        (["--option", "echo_delay_ms=1", "--max-p99-itl", "0ms"], '--max-p99-itl "0ms" is not allowed'),
        (["--option", "echo_delay_ms=1", "--min-cache-hit", "x"], '--min-cache-hit "x" is not allowed'),
    ],
)
def test_what_cannot_be_tried_is_said_before_anything_is(model: Path, arguments: list[str], message: str) -> None:
    done = tune(model, *arguments)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (model.parent / "lmi-tune.sqlite").exists()


# --- spaces ---


def test_a_space_has_lists_and_ranges() -> None:
    space = parse_space(["a=8,16", "option.b=0.8:0.9", "job_queue_size=1:9:4"])
    assert space == {
        "option.a": Choices(("8", "16")),
        "option.b": Range(0.8, 0.9),
        "job_queue_size": Range(1, 9, 4),
    }
    assert size_of(space) is None
    del space["option.b"]
    assert size_of(space) == 6
    assert [tuple(each.values()) for each in grid(space)][:4] == [("8", "1"), ("8", "5"), ("8", "9"), ("16", "1")]
    with pytest.raises(ConfigurationError, match="--grid needs a step for the range of b"):
        list(grid({"b": Range(0.8, 0.9)}))


def test_the_variables_of_vllms_script() -> None:
    variables = {"NUM_SEQS_LIST": "128 256", "NUM_BATCHED_TOKENS_LIST": "4096", "MAX_MODEL_LEN": "2048"}
    assert space_of_script(variables) == {
        "option.max_rolling_batch_size": Choices(("128", "256")),
        "option.max_rolling_batch_prefill_tokens": Choices(("4096",)),
        "option.max_model_len": Choices(("2048",)),
    }
    assert space_of_script({"NUM_SEQS_LIST": " "}) == {}


def test_the_first_example_of_the_docs_fits_the_demo_model(tmp_path: Path) -> None:
    """The demo model is a Llama, which the rolling batch serves here."""
    (tmp_path / "serving.properties").write_text("option.entryPoint=djl_python.huggingface\n")
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 8, "hidden_size": 8}
    heads = {"num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 8, "max_position_embeddings": 8192}
    (tmp_path / "config.json").write_text(json.dumps(config | heads))
    docs = (ROOT / "docs" / "tuning.md").read_text()
    example = docs[docs.index("    lmi-server tune") : docs.index("It starts a server of its own")]
    options = re.findall(r"--option (\S+)", example)
    assert len(options) == 2
    check_space(tmp_path, parse_space(options), {})


# --- the search ---


def searching(path: Path, space: Space, **what: Any) -> Search:
    from lmi_server.tune.search import Search  # optuna takes a second to import

    return Search(path, what, space, seed=1, is_grid=False)


def parabola(settings: Mapping[str, str], best: float) -> Outcome:
    """Return most for x=70; settings above 90 do not load."""
    x = float(settings.get("option.x", 0))
    if x > 90:
        return Outcome(None, reason="out of memory")
    return Outcome(10_000 - (x - 70) ** 2, 1, {"e2el_ms": {"p99": x}})


@pytest.mark.slow
def test_the_search_comes_near_the_best_in_few_trials(tmp_path: Path) -> None:
    search = searching(tmp_path / "study", {"option.x": Range(0, 1000)})
    tried = list(search.run(30, parabola))
    assert len(tried) == 31
    best = best_of(search.trials)
    assert best is not None
    assert abs(float(best.settings["option.x"]) - 70) <= 20
    assert any(trial.outcome.reason == "out of memory" for trial in tried)
    assert list(search.run(30, parabola)) == []


@pytest.mark.slow
def test_an_option_that_ends_trials_early_is_important(tmp_path: Path) -> None:
    def measured(settings: Mapping[str, str], best: float) -> Outcome:
        slow = settings.get("option.a") == "slow"
        value = 100.0 * (1 if slow else 4) + float(settings.get("option.b", 0))
        return Outcome(value, 1, {"e2el_ms": {"p99": 1.0}}, "given up after a short run" if slow else "", slow)

    space = {"option.a": Choices(("slow", "fast")), "option.b": Choices(tuple("123456789"))}
    search = searching(tmp_path / "study", space)
    assert len(list(search.run(100, measured))) == 19
    assert search.importances["option.a"] > search.importances["option.b"]


@pytest.mark.slow
def test_a_small_space_ends_when_all_is_tried(tmp_path: Path) -> None:
    space = {"option.x": Choices(("1", "2", "3"))}
    search = searching(tmp_path / "study", space)
    assert len(list(search.run(100, parabola))) == 4
    assert searching(tmp_path / "study", space, other=1).trials == []
    assert search.recall("costs", lambda: [{"a": 1}]) == [{"a": 1}]
    assert searching(tmp_path / "study", space).recall("costs", list) == [{"a": 1}]


@pytest.mark.slow
def test_a_full_disk_is_said_and_loses_no_trial(tmp_path: Path) -> None:
    """No file of this process may grow beyond the size that the study has after two trials."""
    path, space = tmp_path / "study", {"option.x": Choices(("1", "2", "3"))}

    def bulky(settings: Mapping[str, str], best: float) -> Outcome:
        return replace(parabola(settings, best), reason="x" * 100_000)

    search = searching(path, space)
    kept = list(itertools.islice(search.run(9, bulky), 2))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size, before[1]))
        with pytest.raises(ConfigurationError, match=r"study cannot be written: .*the trials before are kept"):
            list(searching(path, space).run(9, bulky))
        with pytest.raises(ConfigurationError, match="study cannot be written"):
            searching(path, space).recall("pair 0", lambda: "x" * 100_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    search = searching(path, space)
    assert search.trials == kept
    assert len(list(search.run(9, bulky))) == 2


def outcome(value: float | None, p99: float) -> Outcome:
    return Outcome(value, 4, {"e2el_ms": {"p99": p99}})


# --- the confirmation ---


def valued(number: int, value: float | None, is_pruned: bool = False) -> TuneTrial:
    return TuneTrial(
        number, {} if number < 0 else {"option.a": str(number)}, Outcome(value, 4, {}, is_pruned=is_pruned)
    )


def test_the_best_other_setting_is_measured_beside_the_configuration_as_it_is() -> None:
    trials = [valued(-1, 100.0), valued(1, 90.0), valued(2, 95.0), valued(3, None), valued(4, 99.0, is_pruned=True)]
    assert candidate_of(trials) is trials[2]
    assert candidate_of([valued(-1, None), valued(1, 90.0)]) is None  # anything is better
    assert candidate_of([valued(-1, 100.0), valued(3, None)]) is None


def test_runs_take_turns_and_are_remembered() -> None:
    runs: list[bool] = []
    kept: dict[str, Any] = {}

    def measure(settings: Mapping[str, str], best: float) -> Outcome:
        if len(runs) == 5:
            raise KeyboardInterrupt
        runs.append(bool(settings))
        return Outcome(110.0 if settings else 100.0)

    def recall(name: str, make: Any) -> Any:
        if name not in kept:
            kept[name] = json.loads(json.dumps(make()))
        return kept[name]

    with pytest.raises(KeyboardInterrupt):
        confirm(valued(1, 120.0), 4, measure, recall)
    assert runs == [False, True, True, False, False]
    del runs[:]
    found = confirm(valued(1, 120.0), 4, measure, recall)
    assert runs == [True, True, False]  # the others were known
    assert found.pairs == [(110.0, 100.0)] * 4
    assert found.ratios is not None
    assert found.ratios.median == pytest.approx(1.1)


@pytest.mark.parametrize(
    ("ratios", "interval", "confidence", "is_better"),
    [
        ([1.02, 1.05, 1.03, 1.01, 1.04, 1.06], (1.01, 1.06), 1 - 2 / 2**6, True),
        ([1.2, 1.1, 1.3, 0.99, 1.2, 1.2], (0.99, 1.3), 1 - 2 / 2**6, False),
        ([0.5, *[1.1] * 8], (1.1, 1.1), 1 - 2 * 10 / 2**9, True),  # of 9, one at each end may be anything
        ([1.1], (1.1, 1.1), 0.0, True),
    ],
)
def test_one_lucky_run_does_not_win(
    ratios: list[float], interval: tuple[float, float], confidence: float, is_better: bool
) -> None:
    found = Confirmation(1, [(100 * ratio, 100.0) for ratio in ratios])
    assert found.ratios is not None
    assert found.ratios.interval == pytest.approx(interval)
    assert found.ratios.confidence == pytest.approx(confidence)
    assert found.is_better is is_better
    trials = [valued(-1, 100.0), valued(1, 130.0)]
    assert choose(trials, found) is trials[is_better]
    assert choose(trials, None) is trials[1]


def test_a_setting_that_breaks_the_limits_once_is_not_confirmed() -> None:
    outcomes = iter([Outcome(100.0), Outcome(120.0), Outcome(None, reason="p99 of e2el is 9 s"), Outcome(100.0)])
    confirmation = confirm(valued(1, 120.0), 2, lambda settings, best: next(outcomes), lambda name, make: make())
    assert confirmation.ratios is None
    assert not confirmation.is_better
    asked = replace(found(valued(-1, 100.0), valued(1, 120.0)), confirmation=confirmation)
    text = markdown("Search", sections(asked))
    assert "a=1 or the configuration as it is gave nothing once: p99 of e2el is 9 s. Nothing is to change." in text


def test_the_report_says_what_the_pairs_leave_open() -> None:
    trials = [valued(-1, 100.0), valued(1, 104.0)]
    better = Confirmation(1, [(ratio, 1.0) for ratio in (1.02, 1.03, 1.04, 1.05, 1.06, 1.07)])
    told = found(*trials, confirmation=better)
    assert "gives 1.045 times the throughput of the configuration as it is (1.020 to 1.070, 97% sure)." in markdown(
        "Search", sections(told)
    )
    unclear = replace(told, confirmation=Confirmation(1, [(ratio, 1.0) for ratio in (0.98, 1.03, 1.04, 1.05)]))
    assert "that may be chance, and the configuration as it is stays." in markdown("Search", sections(unclear))
    assert any("use more --requests, or more pairs" in step for step in next_steps(unclear))
    equal = replace(told, confirmation=Confirmation(1, [(ratio, 1.0) for ratio in (0.98, 1.0, 1.01, 1.02)]))
    assert not any("use more --requests" in step for step in next_steps(equal))


def test_the_front_leaves_out_what_is_worse_in_both() -> None:
    trials = [
        TuneTrial(number, {}, outcome(*pair)) for number, pair in enumerate([(10, 5), (20, 9), (15, 9), (None, 1)])
    ]
    assert [trial.number for trial in pareto(trials, "e2el_ms")] == [0, 1]


def found(*trials: TuneTrial, **more: Any) -> SearchResult:
    space: Space = {"option.a": Choices(("1", "2", "4")), "option.b": Choices(("x", "y")), "option.c": Range(0, 9)}
    return SearchResult(trials=trials, space=space, importances={}, concurrency=4, has_data=True, **more)


@pytest.mark.parametrize(
    ("asked", "steps"),
    [
        (found(), ["No setting keeps the limits", "0 settings are few for 3 options: --trials 15"]),
        (found(*[TuneTrial(1, {"option.a": "2", "option.b": "x", "option.c": "4"}, outcome(9, 5))] * 15), []),
        (
            found(*[TuneTrial(1, {"option.a": "4", "option.c": "0"}, outcome(9, 5))] * 15),
            ["The best option.a, 4, is the highest that was tried: try higher", "The best option.c, 0, is the lowest"],
        ),
        (
            found(*[TuneTrial(-1, {}, outcome(100, 5)), TuneTrial(1, {"option.a": "2"}, outcome(101, 5))] * 8),
            ["The best is within 3 % of the configuration as it is"],
        ),
        (
            replace(found(*[TuneTrial(1, {}, outcome(9, 5))] * 15), concurrency=8, importances={"option.a": 0.01}),
            ["The limits hold at 4 requests at a time, not at 8", "option.a explains 1% of the differences: leave it"],
        ),
        (
            replace(found(*[TuneTrial(1, {}, outcome(9, 5))] * 15), has_data=False, unused_adapters=["x"]),
            ["The model has adapters that were not in the traffic (x)", "The prompts were random"],
        ),
    ],
)
def test_what_to_measure_next(asked: SearchResult, steps: list[str]) -> None:
    given = next_steps(asked)
    assert len(given) == len(steps), given
    assert all(text.startswith(start) for text, start in zip(given, steps, strict=True))


def test_a_report_in_markdown() -> None:
    costs = [Cost("base", 10.0, 4.0), Cost("one", 15.0, 4.0, load_s=0.5), Cost("merged", reason="no | peft")]
    best = TuneTrial(3, {"option.a": "2"}, outcome(120.0, 2500))
    asked = replace(found(TuneTrial(-1, {}, outcome(60.0, 1000)), best), costs=costs, difference="-a\n+b\n")
    text = markdown("Search", sections(asked))
    assert "The best of 2 settings gives 120.0 output tokens/s: a=2." in text
    assert "That is 2.00 times the 60.0 of the configuration as it is." in text
    assert "```\n-a\n+b\n```" in text
    assert "| one | 15.0 (+50%) | 4.0 |" in text
    assert "no \\| peft" in text
    assert "p99 ITL, ms" in text


@pytest.mark.slow
def test_an_adapter_is_merged_into_its_model(tmp_path: Path) -> None:
    import torch
    from adapter_helpers import save_adapter, with_adapter
    from tiny_models import tiny_model
    from transformers import AutoModelForCausalLM

    base, out = tmp_path / "base", tmp_path / "out"
    tiny_model("llama").save_pretrained(base)
    (base / "serving.properties").write_text("option.enable_lora=true\noption.dtype=fp32\n")
    model = AutoModelForCausalLM.from_pretrained(base)
    adapter = save_adapter(model, tmp_path / "adapter")
    merge(base, adapter, out)
    ids = torch.tensor([[1, 2, 3]])
    merged = AutoModelForCausalLM.from_pretrained(out)(ids).logits
    assert torch.allclose(merged, with_adapter(model, adapter)(ids).logits, atol=1e-3)
    assert not torch.allclose(merged, model(ids).logits, atol=0.1)
    assert (out / "serving.properties").read_text() == "option.dtype=fp32\n"


def test_limits_say_what_broke_them() -> None:
    figures: dict[str, Any] = {"e2el_ms": {"p99": 2500}, "ttft_ms": {}, "prompt_tokens": 100, "cached_tokens": 20}
    assert Limits({"e2el": 3.0}, 0.2).broken_by(figures) == ""
    assert Limits({"e2el": 2.0}).broken_by(figures) == "p99 of e2el is 2.50 s, more than 2"
    assert Limits({"itl": 0.1}).broken_by({**figures, "itl_ms": {"p99": 320}}) == "p99 of itl is 0.32 s, more than 0.1"
    assert Limits({}, 0.3).broken_by(figures) == "20% of prompt tokens were in the cache, less than 30%"


def test_found_values_replace_those_of_the_file() -> None:
    best = TuneTrial(7, {"option.a": "8", "option.b": "2"}, outcome(120.0, 2500))
    text = "option.a = 4\noption.ab=1"
    tuned = tuned_properties(text, best, TuneTrial(-1, {}, outcome(60.0, 1000)))
    comment = "# lmi-server tune: trial 7, 120.0 output tokens/s at 4 requests, p99 end to end 2.50 s (before: 60.0 "
    assert tuned.splitlines()[1:3] == ["option.a=8", "option.ab=1"]
    assert tuned.splitlines()[0].startswith(comment)
    assert tuned.splitlines()[4] == "option.b=2"
    assert tuned_properties(tuned, best, None).splitlines()[1::3] == ["option.a=8", "option.b=2"]
    assert "-option.a = 4" in difference(text, tuned, "file")
