"""The sklearn and xgboost handlers on real small models, compared with the libraries' own predictions."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from model_directories import write_properties
from paths import SAMPLES
from pipeline_helpers import ask, content_of, request, started
from server_helpers import running
from skops_helpers import import_skops

from lmi_server.configuration.resolve import resolve_model
from lmi_server.contract.errors import ConfigurationError, HandlerError, LmiServerError, ModelLoadError, RequestError

if TYPE_CHECKING:
    import xgboost
    from sklearn.ensemble import RandomForestClassifier

pytestmark = pytest.mark.slow

SKLEARN = "djl_python.sklearn_handler"
TREE = "sklearn.tree._tree.Tree"  # what a forest is made of
XGBOOST = "djl_python.xgboost_handler"
ROWS = np.random.default_rng(1).normal(size=(60, 4)).round(3)
CLASSES = np.array(["low", "high"])[(ROWS[:, 0] + ROWS[:, 1] > 0).astype(int)]
VALUES = ROWS @ np.array([1.0, -2.0, 0.5, 3.0]) + 1


def forest() -> RandomForestClassifier:
    from sklearn.ensemble import RandomForestClassifier

    return RandomForestClassifier(n_estimators=5, random_state=0).fit(ROWS, CLASSES)


def booster() -> xgboost.Booster:
    import xgboost

    data = xgboost.DMatrix(ROWS, VALUES)
    return xgboost.train({"max_depth": 3, "nthread": 1, "objective": "reg:squarederror"}, data, 5)


def save_skops(path: Path) -> None:
    import_skops().dump(forest(), path.with_suffix(".skops"))


def save_joblib(path: Path) -> None:
    import joblib

    joblib.dump(forest(), path.with_suffix(".joblib"))


def save_pickle(path: Path) -> None:
    path.with_suffix(".pkl").write_bytes(pickle.dumps(forest()))


def serve(directory: Path, entry_point: str, save: Callable[[Path], None], **options: str) -> Any:
    directory.mkdir(exist_ok=True)
    save(directory / "model")
    return started(
        directory,
        entryPoint=entry_point,
        **{"skops_trusted_types": TREE, **options} if entry_point == SKLEARN else options,
    )


@pytest.fixture
def sklearn(tmp_path: Path) -> Any:
    return serve(tmp_path, SKLEARN, save_skops)


@pytest.mark.parametrize(
    ("save", "options"),
    [
        (save_skops, {}),
        (save_skops, {"model_format": "skops"}),
        (save_joblib, {"trust_insecure_model_files": "true"}),
        (save_pickle, {"trust_insecure_model_files": "true", "model_format": "pickle"}),
    ],
)
def test_sklearn_answers_as_the_library(tmp_path: Path, save: Any, options: dict[str, str]) -> None:
    handler = serve(tmp_path, SKLEARN, save, **options)
    expected = forest().predict(ROWS).tolist()
    assert ask(handler, {"inputs": ROWS.tolist()}) == {"predictions": expected}


@pytest.mark.parametrize("ending", ["json", "ubj"])
def test_xgboost_answers_as_the_library(tmp_path: Path, ending: str) -> None:
    import xgboost

    handler = serve(tmp_path, XGBOOST, lambda path: booster().save_model(path.with_suffix(f".{ending}")))
    expected = booster().predict(xgboost.DMatrix(ROWS))
    assert ask(handler, {"inputs": ROWS.tolist()})["predictions"] == pytest.approx(expected.tolist())


def test_a_classifier_of_xgboost_gives_a_row_of_probabilities(tmp_path: Path) -> None:
    import xgboost

    classifier = xgboost.XGBClassifier(n_estimators=3, n_jobs=1).fit(ROWS, np.arange(60) % 3)
    handler = serve(tmp_path, XGBOOST, lambda path: classifier.save_model(path.with_suffix(".json")))
    found = ask(handler, {"inputs": ROWS[:2].tolist()})["predictions"]
    assert np.array(found) == pytest.approx(classifier.predict_proba(ROWS[:2]), abs=1e-6)
    missing = [[None, *ROWS[0, 1:].tolist()]]
    alone = classifier.predict_proba(np.array(missing, dtype=float))
    assert np.array(ask(handler, {"inputs": missing})["predictions"]) == pytest.approx(alone, abs=1e-6)


def test_a_pickled_classifier_of_xgboost_is_loaded_if_it_is_trusted(tmp_path: Path) -> None:
    import xgboost

    classifier = xgboost.XGBClassifier(n_estimators=3, n_jobs=1).fit(ROWS, np.arange(60) % 2)
    (tmp_path / "model.pkl").write_bytes(pickle.dumps(classifier))
    with pytest.raises(
        ModelLoadError, match=r"can run code.*as json or ubj, or set option\.trust_insecure_model_files"
    ):
        started(tmp_path, entryPoint=XGBOOST)
    handler = started(tmp_path, entryPoint=XGBOOST, trust_insecure_model_files="true")
    assert ask(handler, ROWS.tolist())["predictions"] == classifier.predict(ROWS).tolist()


# --- requests ---


@pytest.mark.parametrize("body", [{"inputs": ROWS[:1].tolist()}, ROWS[:1].tolist(), {"inputs": ROWS[0].tolist()}])
def test_a_row_may_come_in_several_forms(sklearn: Any, body: Any) -> None:
    assert ask(sklearn, body) == {"predictions": forest().predict(ROWS[:1]).tolist()}


def test_csv_comes_and_goes_without_names(sklearn: Any) -> None:
    lines = "\n".join(",".join(map(str, row)) for row in ROWS[:3].tolist())
    expected = forest().predict(ROWS[:3]).tolist()
    found = ask(sklearn, lines.encode(), content_type="text/csv", accept="text/csv")
    assert found == "".join(f"{name}\n" for name in expected)
    assert ask(sklearn, lines.encode(), content_type="text/csv", accept="*/*") == {"predictions": expected}


def test_default_accept_says_what_anything_is(tmp_path: Path) -> None:
    handler = serve(tmp_path, SKLEARN, save_skops, default_accept="text/csv")
    expected = f"{forest().predict(ROWS[:1])[0]}\n"
    assert ask(handler, {"inputs": ROWS[:1].tolist()}) == expected
    assert ask(handler, {"inputs": ROWS[:1].tolist()}, accept="*/*") == expected
    assert ask(handler, {"inputs": ROWS[:1].tolist()}, accept="application/json")["predictions"]


def test_rows_of_several_requests_are_predicted_together(sklearn: Any) -> None:
    bodies: list[Any] = [
        {"inputs": ROWS[:2].tolist()},
        {"inputs": [[1.0]]},
        b"nonsense",
        {"inputs": ROWS[2:3].tolist()},
    ]
    first, narrow, broken, second = sklearn.handle([request(body) for body in bodies])
    assert content_of(first)["predictions"] + content_of(second)["predictions"] == forest().predict(ROWS[:3]).tolist()
    assert isinstance(narrow, RequestError)
    assert "expecting 4 features" in narrow.message
    assert isinstance(broken, RequestError)


def test_texts_reach_a_model_that_was_trained_on_them(tmp_path: Path) -> None:
    from sklearn.linear_model import LinearRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder

    model = make_pipeline(OneHotEncoder(), LinearRegression()).fit(
        [["a", "x"], ["b", "y"], ["a", "y"]], [1.0, 2.0, 3.0]
    )
    import_skops().dump(model, tmp_path / "model.skops")
    handler = started(tmp_path, entryPoint=SKLEARN)
    found = ask(handler, {"inputs": [["a", "x"], ["b", "y"]]})["predictions"]
    assert found == pytest.approx([1.0, 2.0])


@pytest.mark.parametrize(
    ("body", "headers", "message"),
    [
        ({}, {}, "inputs is missing"),
        ({"inputs": [[]]}, {}, "a row is empty"),
        ({"inputs": [[1, 2], [1]]}, {}, "rows have different lengths"),
        ({"inputs": [[1, {"a": 1}, 2, 3]]}, {}, "values are no numbers"),
        ({"inputs": [[10**400, 2, 3, 4]]}, {}, "values are no numbers"),
        (b"a,b,c,d\n1,2,3,4\n", {"content_type": "text/csv"}, "no CSV of numbers"),
        (b"", {"content_type": "text/csv"}, "the body is empty"),
        ({"inputs": [[1, 2, 3, 4]]}, {"accept": "image/png"}, "accept application/json, text/csv"),
    ],
)
def test_what_is_no_table_is_refused(sklearn: Any, body: Any, headers: dict[str, str], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        ask(sklearn, body, **headers)


# --- files ---


def test_a_file_that_can_run_code_needs_trust(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"can run code.*as skops, or set option\.trust_insecure_model_files=true"):
        serve(tmp_path, SKLEARN, save_joblib)


def test_a_skops_file_with_untrusted_types_is_refused(tmp_path: Path) -> None:
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import FunctionTransformer

    import_skops().dump(make_pipeline(FunctionTransformer(np.sort)), tmp_path / "model.skops")
    with pytest.raises(ModelLoadError, match=r"contains types that skops does not trust: numpy\.sort; add"):
        started(tmp_path, entryPoint=SKLEARN)
    handler = started(tmp_path, entryPoint=SKLEARN, skops_trusted_types="numpy.sort")
    with pytest.raises(HandlerError, match="predict"):
        ask(handler, {"inputs": [[1.0]]})


def test_one_file_is_expected(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"one file \*\.skops, \*\.joblib.* is needed, found: none"):
        started(tmp_path, entryPoint=SKLEARN)
    save_skops(tmp_path / "first")
    save_joblib(tmp_path / "second")
    with pytest.raises(ModelLoadError, match=r"found: first\.skops, second\.joblib; set option\.model_format"):
        started(tmp_path, entryPoint=SKLEARN)
    assert ask(started(tmp_path, entryPoint=SKLEARN, model_format="skops", skops_trusted_types=TREE), ROWS[:1].tolist())


def test_a_file_that_is_damaged_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text("{}")
    with pytest.raises(ModelLoadError, match=r"model\.json: cannot be loaded as json"):
        started(tmp_path, entryPoint=XGBOOST)


def test_the_file_of_a_model_chooses_the_handler(tmp_path: Path) -> None:
    save_skops(tmp_path / "model")
    assert resolve_model(tmp_path, {}).handler == "handlers.tabular.sklearn_handler:SklearnHandler"


def test_a_format_of_the_other_library_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="allowed: json, ubj, pickle, xgb"):
        started(tmp_path, entryPoint=XGBOOST, model_format="skops")


# --- the user's own functions ---


# The decorators of djl_python set these attributes and nothing else.
DECORATED = """
def make(model_dir):
    return 10

def times(rows, model):
    return rows * model

def write(predictions):
    return {"answers": predictions.tolist()}

make.is_init_handler = times.is_prediction_handler = write.is_output_formatter = True

def predict_fn(input_data, model):
    raise ValueError("decorated functions rule this one out")
"""
SAGEMAKER = """
import json

def predict_fn(input_data, model):
    if input_data.shape[1] != 4:
        raise ValueError("four columns, please")
    return model.predict_proba(input_data)

def output_fn(prediction, accept):
    if accept == "text/plain":
        return json.dumps(prediction.round(3).tolist()), "application/x-own"
    return json.dumps(prediction.round(3).tolist())
"""


def test_functions_as_sagemaker_names_them_take_over(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(SAGEMAKER)
    handler = serve(tmp_path, SKLEARN, save_skops)
    expected = forest().predict_proba(ROWS[:2]).round(3).tolist()
    assert ask(handler, {"inputs": ROWS[:2].tolist()}, accept="application/json") == expected
    anything = handler.handle([request({"inputs": ROWS[:2].tolist()}, accept="*/*")])[0]
    assert not isinstance(anything, LmiServerError)
    assert dict(anything.headers)["content-type"] == "application/json"
    assert json.loads(anything.data) == expected
    named = handler.handle([request({"inputs": ROWS[:2].tolist()}, accept="text/plain")])[0]
    assert not isinstance(named, LmiServerError)
    assert dict(named.headers)["content-type"] == "application/x-own"
    assert json.loads(named.data) == expected
    outcomes = handler.handle([request({"inputs": [[1.0]]}), request({"inputs": ROWS[:1].tolist()})])
    assert isinstance(outcomes[0], LmiServerError)
    assert "model.py:6: ValueError: four columns, please" in outcomes[0].message
    assert not isinstance(outcomes[1], LmiServerError)


def test_decorated_functions_take_over(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(DECORATED)
    handler = started(tmp_path, entryPoint=XGBOOST)
    assert ask(handler, {"inputs": [[1, 2], [3, 4]]}) == {"answers": [[10, 20], [30, 40]]}
    assert ask(handler, b"1,2\n", content_type="text/csv") == {"answers": [[10.0, 20.0]]}


# --- samples, and the whole way over HTTP ---


def test_the_samples_run(tmp_path: Path) -> None:
    import xgboost

    samples = SAMPLES
    for name in ("sklearn", "xgboost"):
        directory = tmp_path / name
        directory.mkdir()
        shutil.copy(samples / f"{name}.properties", directory / "serving.properties")
    save_skops(tmp_path / "sklearn" / "model")
    booster().save_model(tmp_path / "xgboost" / "model.json")
    assert ask(started(tmp_path / "sklearn"), ROWS.tolist())["predictions"] == forest().predict(ROWS).tolist()
    values = [float(line) for line in ask(started(tmp_path / "xgboost"), ROWS.tolist()).split()]
    assert values == pytest.approx(booster().predict(xgboost.DMatrix(ROWS)).tolist(), rel=1e-5)


def test_rows_travel_over_http(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    save_skops(directory / "model")
    write_properties(directory, skops_trusted_types=TREE, batch_size=8, max_batch_delay=5)
    expected = forest().predict(ROWS).tolist()
    with running(directory) as server, ThreadPoolExecutor(8) as clients:
        server.log_line(r"\] ready: process")
        answers = list(clients.map(lambda row: server.http.post("/invocations", json={"inputs": row}), ROWS.tolist()))
        assert [answer.json()["predictions"] for answer in answers] == [[name] for name in expected]
        narrow = server.http.post("/invocations", json={"inputs": [[1.0]]})
        assert (narrow.status_code, "expecting 4 features" in narrow.json()["message"]) == (424, True)
