"""A model that does what the header `x-cmd` names: a command below, or an expression after "="."""

import datetime
import io
import json
import logging
import os
import sys
import time
from pathlib import Path

from djl_python import Input, Output

COMMANDS = {}


def command(function):
    COMMANDS[function.__name__] = function
    return function


def handle(i):
    if i.is_empty():
        return None
    name = i.get_property("x-cmd") or "dump"
    return evaluated(name[1:], i) if name.startswith("=") else COMMANDS[name](i)


def evaluated(expression, i):
    value = eval(expression, globals(), {"i": i, "Output": Output, "Input": Input})
    if isinstance(value, Output):
        return value
    return Output().add_property("content-type", "text/plain").add(f"{type(value).__name__}:{value!r}")


def json_output(value):
    text = json.dumps(value, sort_keys=True, default=str)
    return Output().add_property("content-type", "application/json").add(text)


def described(content, size):
    return [(len(value), bytes(value[:size]).decode("latin-1"), type(value).__name__) for value in content.values]


def write_finished(i, text):
    Path(i.get_property("model_dir"), "fin.txt").write_text(text)


@command
def dump(i):
    p = {k: str(v) for k, v in i.get_properties().items()}
    c = i.get_content()
    return json_output(
        {
            "props": p,
            "keys": list(c.keys),
            "vals": described(c, 200),
            "batch": i.is_batch(),
            "bs": i.get_batch_size(),
            "fn": i.get_function_name(),
            "empty": i.is_empty(),
        }
    )


@command
def content(i):
    c = i.get_content()
    return json_output(
        {
            "ct": i.get_property("content-type"),
            "keys": list(c.keys),
            "vals": described(c, 300),
        }
    )


@command
def echo(i):
    return Output().add(i.get_as_bytes())


@command
def big(i):
    return Output().add(b"x" * int(i.get_property("x-n")))


@command
def none(i):
    return None


@command
def rlist(i):
    return [Output()]


@command
def raise_value(i):
    raise ValueError("boom")


@command
def raise_empty(i):
    raise ValueError()


@command
def raise_uni(i):
    raise ValueError('b\u00e9\u4e2d\n"q" \u0001')


@command
def raise_mem(i):
    raise MemoryError


@command
def raise_cache(i):
    raise ValueError("No available memory for the cache blocks. Try")


@command
def raise_rec(i):
    def f():
        return f()

    return f()


@command
def err(i):
    return Output().error("boom")


@command
def err400(i):
    return Output().error("boom", code=400)


@command
def err_msg(i):
    return Output().error("boom", code=422, message="my message")


@command
def err_507(i):
    return Output().error("boom", code=507)


@command
def err_200(i):
    return Output().error("boom", code=200)


@command
def err_uni(i):
    return Output().error('b\u00e9\u4e2d "x"')


@command
def err_none(i):
    return Output().error(None)


@command
def err_dict(i):
    return Output().error({"a": [1]})


@command
def err_after_add(i):
    return Output().add("first").error("boom")


@command
def err_prop(i):
    return Output().add_property("x-a", "1").error("boom", code=503)


@command
def code(i):
    return Output(code=int(i.get_property("x-code"))).add("body")


@command
def code_nobody(i):
    return Output(code=int(i.get_property("x-code")))


@command
def code_msg(i):
    return Output(code=int(i.get_property("x-code")), message="Custom Reason").add("body")


@command
def msg_nl(i):
    return Output(code=404, message="a\r\nX-Inject: 1").add("body")


@command
def msg_empty(i):
    return Output(code=404, message="").add("body")


@command
def props(i):
    o = Output().add("body")
    for k, v in json.loads(i.get_as_string()):
        o.add_property(k, v)
    return o


@command
def prop_obj(i):
    return (
        Output()
        .add_property("x-d", {"a": 1})
        .add_property("x-l", [1, 2])
        .add_property("x-f", 1.5)
        .add_property("x-b", True)
        .add_property("x-n", None)
        .add("b")
    )


@command
def add_multi(i):
    return Output().add("one", key="a").add("two", key="data").add("three")


@command
def add_multi2(i):
    return Output().add("one", key="a").add("two", key="b")


@command
def add_keyint(i):
    return Output().add("one", key=5)


@command
def add_dict(i):
    return Output().add({"a": [1, 2, {"b": None}], "u": "\u00e9"})


@command
def add_list(i):
    return Output().add([1, 2.5, "x"])


@command
def add_int(i):
    return Output().add(5)


@command
def add_none(i):
    return Output().add(None)


@command
def add_date(i):
    return Output().add({"d": datetime.date(2020, 1, 2)})


@command
def add_np(i):
    import numpy as np

    return Output().add({"i": np.int64(3), "f": np.float32(0.5), "a": np.arange(4).reshape(2, 2), "b": np.bool_(True)})


@command
def add_bytesjson(i):
    return Output().add({"b": b"abc"})


@command
def add_mv(i):
    return Output().add(memoryview(b"abc"))


@command
def add_ba(i):
    return Output().add(bytearray(b"abc"))


@command
def add_json_nan(i):
    return Output().add_as_json([float("inf")])


@command
def add_npz_out(i):
    import numpy as np

    o = Output().add_as_npz([np.arange(6, dtype="float32").reshape(2, 3)])
    z = np.load(io.BytesIO(bytes(o.content.value_at(0))))
    return json_output({"files": z.files, "sum": float(z[z.files[0]].sum())})


@command
def chain(i):
    return Output().set_code(202).set_message("Acc").add_property("x-a", "1").add("b")


@command
def fin_read(i):
    time.sleep(0.2)
    path = Path(i.get_property("model_dir"), "fin.txt")
    text = path.exists() and path.read_text()
    path.unlink(missing_ok=True)
    return Output().add(str(text))


@command
def fin_raise(i):
    def f():
        raise ValueError("in finalize")

    return Output().add("b").finalize(f)


def steps(*items, sleep=0.02):
    for x in items:
        time.sleep(sleep)
        if isinstance(x, BaseException):
            raise x
        yield x


@command
def st_str(i):
    return Output().add_stream_content(steps("a", "b", "c"), None)


@command
def st_uni(i):
    return Output().add_stream_content(steps("\u00e9"))


@command
def st_bytes(i):
    return Output().add_stream_content(steps(b"a", bytearray(b"b")), None)


@command
def st_fmt(i):
    return Output().add_stream_content(steps("a", "b"), lambda x: x.upper() + "\n")


@command
def st_empty(i):
    return Output().add_stream_content(steps(), None)


@command
def st_one(i):
    return Output().add_stream_content(steps("only"), None)


@command
def st_emptystr(i):
    return Output().add_stream_content(steps("", "a", "", "b"), None)


@command
def st_raise0(i):
    return Output().add_stream_content(steps(ValueError("boom0")), None)


@command
def st_raise_sse(i):
    return (
        Output()
        .add_property("content-type", "text/event-stream")
        .add_stream_content(steps("data: 1\n\n", ValueError("boom1")), None)
    )


@command
def st_raise_e(i):
    return Output().add_stream_content(steps("a", ValueError()), None)


@command
def st_fmtraise(i):
    def f(x):
        if x == "b":
            raise ValueError("fmt")
        return x

    return Output().add_stream_content(steps("a", "b", "c"), f)


@command
def st_code(i):
    return Output(code=201, message="Made").add_stream_content(steps("a", "b"), None)


@command
def st_big(i):
    return Output().add_stream_content(steps(*["x" * 1000000] * 5, sleep=0), None)


@command
def st_fin(i):
    return Output().add_stream_content(steps("a", "b"), None).finalize(lambda text: write_finished(i, text), "sdone")


@command
def st_cl(i):
    return Output().add_property("content-length", "3").add_stream_content(steps("a", "b"), None)


@command
def prints(i):
    print("to stdout", flush=True)
    print("to stderr", file=sys.stderr, flush=True)
    logging.info("to log")
    logging.getLogger("a.b").warning("w")
    print("x" * 200000, flush=True)
    os.write(1, b"\xff\xfe raw\n")
    print(
        "[METRICS]Inference.milliseconds:311|#Level:Host,count:time|#hostname:localhost,1650953744320,request_id",
        flush=True,
    )
    return Output().add("ok")


@command
def sleep(i):
    time.sleep(float(i.get_property("x-s")))
    return Output().add("slept")


@command
def image(i):
    im = i.get_as_image()
    return json_output({"size": im.size, "mode": im.mode, "fmt": im.format})


@command
def npz(i):
    return json_output([[str(array.dtype), list(array.shape), array.tolist()] for array in i.get_as_npz()])


@command
def data(i):
    value = i.get_data()
    if hasattr(value, "size"):
        return Output().add("image")
    return Output().add(f"{type(value).__name__}:{repr(value)[:200] if isinstance(value, list) else value}")


@command
def decode(i):
    from djl_python.encode_decode import decode

    value = decode(i, i.get_property("content-type"))
    is_image = isinstance(value, dict) and hasattr(value.get("inputs"), "getbands")
    return Output().add(f"{type(value).__name__}:{'img' if is_image else value!r}")


@command
def encode(i):
    from djl_python.encode_decode import encode

    output = Output()
    encode(output, i.get_as_json(), i.get_property("accept"))
    return output
