"""Properties that the server sets reach the code of a model as the server set them, whatever a client sends."""

from __future__ import annotations

from pathlib import Path

import pytest
from own_code_helpers import serving_own

NAMES = ("model_dir", "device_id", "tensor_parallel_degree", "cluster_size", "batch_size", "reset_rollingbatch")
CODE = f"""
from djl_python import Input, Output

NAMES = {NAMES}

def seen(item):
    return {{name: item.get_property(name) for name in (*NAMES, "x-mine", "requestId")}}

def handle(inputs: Input):
    output = Output()
    for index, item in enumerate(inputs.get_batches()):
        output.add(seen(item), batch_index=index if inputs.is_batch() else None)
    return None if inputs.is_empty() else output

async def handle_async(inputs: Input):
    return None if inputs.is_empty() else Output().add_as_json(seen(inputs))

def handle_rolling(inputs: Input):
    output = Output()
    for index, item in enumerate(inputs.get_batches()):
        result = {{"data": str(seen(item)), "last": True}}
        output.add(Output.binary_encode(result), key="data", batch_index=index)
    return None if inputs.is_empty() else output
"""
SENT = dict.fromkeys(NAMES, "/etc") | {"Model_Dir": "/etc", "requestid": "7", "x-mine": "1"}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"batch_size": "4", "max_batch_delay": "0"},
        {"handler": "handle_async", "async_mode": "true"},
        {"handler": "handle_rolling", "rolling_batch": "auto"},
    ],
    ids=["alone", "in a batch", "asynchronous", "step by step"],
)
def test_a_client_overrides_nothing_that_the_server_sets(options: dict[str, str], tmp_path: Path) -> None:
    attributes = ";".join(f"{name}=/etc" for name in (*NAMES, "MODEL_DIR", "Device_Id"))
    with serving_own(tmp_path, CODE, **options) as server:
        headers = [SENT, {"x-amzn-sagemaker-custom-attributes": attributes + ";x-mine=1"}]
        answers = [server.http.post("/invocations", content=b"a", headers=given) for given in headers]
        for answer in answers:
            assert answer.status_code == 200, answer.text
            assert "/etc" not in answer.text
            assert "x-mine" in answer.text
        if "rolling_batch" not in options:
            assert answers[0].json()["requestId"] != "7"
            assert answers[0].json()["x-mine"] == "1"
            assert answers[0].json()["model_dir"] == str(tmp_path / "model")


def test_the_handler_cannot_be_chosen_in_another_case(tmp_path: Path) -> None:
    with serving_own(tmp_path, CODE) as server:
        for headers in ({"Handler": "seen"}, {"x-amzn-sagemaker-custom-attributes": "HANDLER=seen"}):
            answer = server.http.post("/invocations", content=b"a", headers=headers)
            assert (answer.status_code, "overridden" in answer.text) == (400, True), answer.text
