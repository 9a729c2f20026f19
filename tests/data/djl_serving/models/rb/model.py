"""A model with a rolling batch of three steps that does what the header `x-cmd` names."""

import json
import time

from djl_python import Output

REQUESTS = []


def handle(i):
    global REQUESTS
    if i.is_empty():
        return None
    if i.get_property("reset_rollingbatch"):
        REQUESTS = []
    b = i.get_batches()
    o = Output()
    for k, x in enumerate(b):
        if k >= len(REQUESTS):
            REQUESTS.append(
                {
                    "c": x.get_property("x-cmd") or "tok",
                    "n": 0,
                    "d": x.get_as_string() if x.get_as_bytes() is not None else None,
                    "keys": list(x.get_content().get_keys()),
                    "props": sorted(x.get_properties()),
                }
            )
    time.sleep(0.02)
    done = []
    for k, r in enumerate(REQUESTS):
        r["n"] += 1
        c = r["c"]
        last = r["n"] >= 3
        res = {"data": f"t{r['n']} ", "last": last}
        if c == "dump":
            res = {
                "data": json.dumps(
                    {
                        "keys": r["keys"],
                        "has": [
                            p
                            for p in r["props"]
                            if p.lower() in ("content-type", "x-cmd", "handler", "requestid", "x-request-id", "host")
                        ],
                    }
                ),
                "last": True,
            }
            last = True
        if c == "emptylast":
            res = {"data": "" if last else "x", "last": last}
        if c == "err2" and r["n"] == 2:
            res = {"data": "", "last": True, "code": "500", "error": "second fails"}
            last = True
        if c == "raise":
            REQUESTS = []
            raise ValueError("step boom")
        if c == "raise2" and r["n"] == 2:
            REQUESTS = []
            raise ValueError("step2 boom")
        if c == "err":
            REQUESTS = []
            return Output().error("out err")
        if c == "size":
            REQUESTS = []
            return Output()
        if c == "mem":
            REQUESTS = []
            raise MemoryError
        o.add(Output.binary_encode(res), batch_index=k)
        if last:
            done.append(k)
    for k in reversed(done):
        REQUESTS.pop(k)
    return o
