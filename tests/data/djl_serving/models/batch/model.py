"""A model with dynamic batching that does what the header `x-cmd` of the first request names."""

import json

from djl_python import Output


def handle(i):
    if i.is_empty():
        return None
    b = i.get_batches()
    n = len(b)
    cmds = [x.get_property("x-cmd") or "" for x in b]
    c = cmds[0]
    o = Output()
    if c == "dump":
        for k, x in enumerate(b):
            o.add_property("content-type", "application/json")
            o.add(
                json.dumps(
                    {
                        "n": n,
                        "batch": i.is_batch(),
                        "keys": x.get_content().get_keys(),
                        "props": sorted(p.lower() for p in x.get_properties()),
                        "raw": sorted(i.get_properties())[:6],
                        "rawkeys": i.get_content().get_keys(),
                    }
                ),
                key="data",
                batch_index=k,
            )
        return o
    if c == "echo":
        for k, x in enumerate(b):
            o.add(f"{k}/{n}:{x.get_as_string()}", key="data", batch_index=k)
        return o
    if c == "nokey":
        for k, x in enumerate(b):
            o.add(f"{k}:{x.get_as_string()}", batch_index=k)
        return o
    if c == "raise":
        raise ValueError("batch boom")
    if c == "err":
        return o.error("batch err")
    if c == "err400":
        return o.error("batch err", code=400, message="m")
    if c == "short":
        return o.add("one", batch_index=0)
    if c == "none":
        return None
    if c == "str":
        return "x"
    if c == "rev":
        for k in reversed(range(n)):
            o.add(f"r{k}", batch_index=k)
        return o
    if c == "extra":
        for k in range(n + 1):
            o.add(f"e{k}", batch_index=k)
        return o
    if c == "multi":
        for k in range(n):
            o.add("a", key="a", batch_index=k)
            o.add("d", key="data", batch_index=k)
        return o
    if c == "stream":
        return o.add_stream_content(iter(["a", "b"]), None)
    if c == "prop":
        for k in range(n):
            o.add("b", batch_index=k)
            o.add_property(f"batch_{k}_x-own", f"v{k}")
        return o
    if c == "code":
        o = Output(code=201, message="Made")
        for k in range(n):
            o.add("b", batch_index=k)
        return o
    if c == "mem":
        raise MemoryError
    raise ValueError(c)
