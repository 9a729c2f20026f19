"""The life of LoRA adapters under vLLM, without an engine: their weights stay while requests use them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from relay_helpers import on_loop

from lmi_server.contract.errors import RequestError
from lmi_server.contract.protocol import Adapter

pytestmark = pytest.mark.slow  # imports vLLM


class RecordingDriver:
    """Records what an engine would do with weights; it cannot read an adapter from the directory `broken`."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    async def add_lora(self, adapter: Any) -> None:
        if adapter.lora_path == "broken":
            raise RuntimeError("no adapter_config.json")
        self.calls.append(("add", adapter.lora_name, adapter.lora_int_id))

    async def pin_lora(self, number: int) -> None:
        self.calls.append(("pin", number))

    async def remove_lora(self, number: int) -> None:
        self.calls.append(("remove", number))


def adapters() -> tuple[Any, RecordingDriver]:
    from handlers.vllm.engine.adapters import Adapters

    driver: Any = RecordingDriver()
    return Adapters(driver, lambda directory: None), driver


@on_loop
async def test_the_weights_of_a_replaced_adapter_stay_until_its_last_request_ends() -> None:
    held, driver = adapters()
    await held.add(Adapter(name="one", directory="first"))
    with held.using("one") as old:
        with held.using("one"):
            await held.add(Adapter(name="one", directory="second"))
            with held.using("one") as new:
                assert (old.lora_path, new.lora_path) == ("first", "second")
                assert old.lora_name != new.lora_name, "vLLM would find the old one's KV cache by the name"
        await asyncio.sleep(0)
        assert ("remove", 1) not in driver.calls
    await asyncio.sleep(0)
    assert driver.calls == [("add", "one", 1), ("add", "one#2", 2), ("remove", 1)]


@on_loop
async def test_an_adapter_that_is_not_preloaded_is_loaded_once_to_see_whether_it_can_be() -> None:
    held, driver = adapters()
    await held.add(Adapter(name="lazy", directory="a", preload=False))
    await held.add(Adapter(name="pinned", directory="b", pin=True))
    assert driver.calls == [("add", "lazy", 1), ("remove", 1), ("add", "pinned", 2), ("pin", 2)]


@on_loop
async def test_an_adapter_that_fails_to_load_changes_nothing() -> None:
    held, _ = adapters()
    await held.add(Adapter(name="one", directory="first"))
    with pytest.raises(RequestError, match=r"cannot use the adapter one: no adapter_config\.json"):
        await held.add(Adapter(name="one", directory="broken"))
    with held.using("one") as adapter:
        assert adapter.lora_path == "first"


@on_loop
async def test_a_removed_adapter_is_unknown_to_new_requests() -> None:
    held, driver = adapters()
    await held.add(Adapter(name="one", directory="first"))
    with held.using("one"):
        await held.remove("one")
        with pytest.raises(RequestError, match="one has not been registered"), held.using("one"):
            pass
    await asyncio.sleep(0)
    assert driver.calls[-1] == ("remove", 1)
    await held.remove("one")


@on_loop
async def test_requests_without_an_adapter_get_the_model_itself() -> None:
    held, _ = adapters()
    with held.using(None) as adapter:
        assert adapter is None
