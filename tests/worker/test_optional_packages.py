"""Packages that the base install does not have: djl_python imports without them, and says which one a call misses."""

from __future__ import annotations

import subprocess
import sys

import pytest
from paths import ROOT

ABSENT = ("numpy", "PIL", "boto3", "torch")
MODULES = sorted(path.stem for path in (ROOT / "lmi_server/compat/djl_python").glob("[a-z]*.py"))

NUMPY = "pip install numpy, or lmi-server[huggingface], which brings it along"


def run_without_packages(code: str) -> str:
    """Run `code` with none of the packages importable; return the last line of standard error."""
    block = f"import sys; sys.modules |= dict.fromkeys({ABSENT!r})"
    command = [sys.executable, "-c", f"{block}\n{code}"]
    path = f"{ROOT / 'lmi_server/compat'}:{ROOT}"
    done = subprocess.run(command, env={"PYTHONPATH": path}, capture_output=True, text=True, timeout=60, check=False)
    return done.stderr.strip().rpartition("\n")[2]


def test_no_module_needs_them_to_be_imported() -> None:
    names = "; ".join(f"import djl_python.{name}" for name in MODULES)
    assert run_without_packages(f"{names}; import handlers.own_code.djl.function") == ""


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("np_util.to_nd_list([])", f"tensors need numpy (import of numpy halted; None in sys.modules); {NUMPY}"),
        ("np_util.from_nd_list(b'PK')", NUMPY),
        ("np_util.from_nd_list(bytes([0, 0, 0, 1, 0, 4]) + b'NDAR')", NUMPY),
        ("np_util.to_npz([])", NUMPY),
        ("np_util.from_npz(b'')", NUMPY),
        ("encode_decode.decode(made('1,2'), 'text/csv', require_csv_headers=False)", NUMPY),
        ("encode_decode.decode(made('PK'), 'tensor/npz')", NUMPY),
        ("session_manager.Session('', pathlib.Path(), 0).get_as_numpy('a', (1,))", NUMPY),
        ("made('').get_as_image()", 'pip install "lmi-server[tasks]"'),
    ],
)
def test_a_call_that_needs_one_names_it_and_the_remedy(call: str, error: str) -> None:
    code = (
        "import pathlib\n"
        "from djl_python import encode_decode, inputs, np_util, session_manager\n"
        "def made(body): return inputs.make_input({}, [('data', body.encode())], None)\n"
    )
    last = run_without_packages(code + call)
    assert last.startswith("ImportError: "), last
    assert last.endswith(error)
