"""An asynchronous model that does what the header `x-cmd` names."""

import asyncio
import json

from djl_python import Output
from djl_python.async_utils import create_non_stream_output


def encoded(**fields):
    return Output().add(Output.binary_encode(fields))


async def handle(i):
    if i.is_empty():
        return None
    c = i.get_property("x-cmd") or "dump"
    if c == "dump":
        return (
            Output()
            .add_property("content-type", "application/json")
            .add(
                Output.binary_encode(
                    {
                        "data": json.dumps(
                            {"keys": i.get_content().get_keys(), "props": sorted(p.lower() for p in i.get_properties())}
                        ),
                        "last": True,
                    }
                )
            )
        )
    if c == "str":
        return "x"
    if c == "code":
        return encoded(data="", last=True, code="422", error="told")
    if c == "ns":
        return create_non_stream_output({"a": 1})
    if c == "nserr":
        return create_non_stream_output("", error="ns err", code=400)
    if c == "gen":

        async def g():
            for k in range(3):
                await asyncio.sleep(0.05)
                yield (
                    Output()
                    .add_property("content-type", "application/jsonlines")
                    .add(Output.binary_encode({"data": f"t{k}\n", "last": k == 2}))
                )

        return g()
    if c == "generr":

        async def g():
            yield encoded(data="a", last=False)
            await asyncio.sleep(0.05)
            yield encoded(data="", last=True, code="500", error="late")

        return g()
    if c == "sleep":
        await asyncio.sleep(1)
        return encoded(data="slept", last=True)
    raise ValueError(c)
