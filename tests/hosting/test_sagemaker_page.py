"""The code of docs/sagemaker.md, as it stands: AWS is simulated by moto, but the endpoint is a real server."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hosting_container import ready, write
from paths import ROOT

pytestmark = pytest.mark.slow

_CODE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_page_is_a_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from moto import mock_aws

    write(tmp_path / "model", serving_properties="option.entryPoint=djl_python.echo", sub__weights_bin="weights")
    program = "\n".join(_CODE.findall((ROOT / "docs/sagemaker.md").read_text()))
    for name, value in {"ACCESS_KEY_ID": "x", "SECRET_ACCESS_KEY": "x", "DEFAULT_REGION": "us-east-1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.chdir(tmp_path)
    with ready(tmp_path) as (_, http), mock_aws():
        monkeypatch.setenv("AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME", str(http.base_url))
        import boto3

        boto3.client("s3").create_bucket(Bucket="my-bucket")
        exec(compile(program, "docs/sagemaker.md", "exec"), {})
        stored = boto3.client("s3").list_objects_v2(Bucket="my-bucket")["Contents"]
        left = boto3.client("sagemaker").list_endpoints()["Endpoints"]
    assert [entry["Key"] for entry in stored] == ["my-model/serving.properties", "my-model/sub/weights.bin"]
    assert left == []
    whole, *stream = capsys.readouterr().out.splitlines()
    assert whole == " The capital of France is The capital of"
    assert "".join(json.loads(line)["token"]["text"] for line in stream) == whole
