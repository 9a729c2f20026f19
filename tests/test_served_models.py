from __future__ import annotations

from pathlib import Path

import pytest
from relay_helpers import FAULTS, on_loop

from frontend.models import MissingModelError, ServedModels
from lmi_server.errors import ModelNotFoundError, RequestError
from lmi_server.protocol import Load
from lmi_server.worker_pool import PoolSettings, WorkerPool


def pool_named(name: str, directory: Path) -> WorkerPool:
    return WorkerPool(PoolSettings(load=Load(name, str(directory), FAULTS, {}, [name])))


@on_loop
async def test_the_body_names_the_model(tmp_path: Path) -> None:
    first, second = pool_named("first", tmp_path), pool_named("second", tmp_path)
    models = ServedModels([(first, ["first"]), (second, ["second", "alias"])])
    assert models.only is None
    assert models.named_in(b'{"model": "first"}') is first
    assert models.named_in(b'\xef\xbb\xbf{"x": [1], "model": "alias"}') is second
    with pytest.raises(ModelNotFoundError, match="third"):
        models.named_in(b'{"model": "third"}')
    for body in (b"", b"{", b"[]", b"{}", b'{"model": 1}', b'{"model": "\xff"}'):
        with pytest.raises(MissingModelError):
            models.named_in(body)
    with pytest.raises(RequestError, match="nested too deeply"):
        models.named_in(b'{"x": ' + b"[" * 100_000)


@on_loop
async def test_two_models_of_one_name(tmp_path: Path) -> None:
    pools = [pool_named(name, tmp_path) for name in ("first", "second")]
    with pytest.raises(ValueError, match="two models are named 'same'"):
        ServedModels([(pool, ["same"]) for pool in pools])
