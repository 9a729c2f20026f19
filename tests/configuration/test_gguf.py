"""Models in GGUF: what their header says, and what is refused before the model loads."""

from __future__ import annotations

import errno
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf_helpers import hostile_gguf, key_of, tensor_of, write_gguf

from lmi_server.configuration.model_directory.gguf import read_gguf
from lmi_server.configuration.resolve import Inspection, inspect_model
from lmi_server.contract.errors import ConfigurationError
from lmi_server.explain.explanation import explain
from lmi_server.machine.inventory import Gpu, Machine

ENGINES = frozenset({"torch", "transformers", "vllm", "deepspeed"})
NO_GPU = Machine(2**34, 2**34, engines=ENGINES)


def inspected(directory: Path, *lines: str, machine: Machine = NO_GPU) -> Inspection:
    (directory / "serving.properties").write_text("\n".join(lines))
    return inspect_model(directory, {}, machine=machine)


def test_a_directory_with_one_file(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    (tmp_path / "mmproj-m.gguf").touch()  # the projector of images is no model
    found = inspected(tmp_path)
    assert (found.location, found.spec.title, found.problems) == (str(path), "huggingface", ())
    explained = explain(found)
    count = 3 * 32 + 32 + 2 * (2 * 32 + 4 * 32 * 32 + 3 * 32 * 48)
    assert explained.files == ()
    assert (explained.memory["parameters"], explained.memory["weights_bytes"]) == (count, 2 * count)
    assert explained.memory["context_length"] == 64
    assert found.config["architectures"] == ["LlamaForCausalLM"]


def test_a_file_that_the_model_id_names(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_gguf(tmp_path / f"{name}.gguf")
    (problem,) = inspected(tmp_path).problems
    assert (
        problem == f"{tmp_path}: holds several models in GGUF (a.gguf, b.gguf); set option.model_id to the name of one"
    )
    found = inspected(tmp_path, "option.model_id=b.gguf")
    assert (found.location, found.problems) == (str(tmp_path / "b.gguf"), ())


def test_the_rolling_batch_serves_it_beside_a_gpu_too(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    gpu = Machine(2**34, 2**34, gpus=(Gpu("0", 2**34, 2**34),), engines=ENGINES)
    for lines in ((), ("option.rolling_batch=auto",), ("option.entryPoint=djl_python.huggingface",)):
        assert inspected(tmp_path, *lines, machine=gpu).spec.title == "huggingface"


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ("option.rolling_batch=vllm", "vllm reads no GGUF; set option.rolling_batch=scheduler"),
        ("option.rolling_batch=disable", "huggingface pipeline reads no GGUF; set option.rolling_batch=scheduler"),
        ("engine=DeepSpeed", "reads no GGUF"),
        ("option.quantize=bitsandbytes4", 'option.quantize = "bitsandbytes4" is not allowed for a model in GGUF'),
        ("engine=MPI\noption.rolling_batch=scheduler", "is not allowed for a model in GGUF"),
    ],
)
def test_what_cannot_serve_it(tmp_path: Path, lines: str, problem: str) -> None:
    write_gguf(tmp_path / "m.gguf")
    assert any(problem in text for text in inspected(tmp_path, lines).problems)


@pytest.mark.parametrize(
    ("architecture", "strings", "problem"),
    [
        ("rwkv7", {}, "general.architecture = rwkv7 is not served from GGUF; allowed: gemma2, gpt2, llama, "),
        ("llama", {"rope__scaling__type": "yarn"}, "scales its rotary positions, which transformers does not read"),
    ],
)
def test_what_transformers_would_not_read_right(
    tmp_path: Path, architecture: str, strings: dict[str, str], problem: str
) -> None:
    path = write_gguf(tmp_path / "m.gguf", architecture, **strings)
    (found,) = inspected(tmp_path).problems
    assert found.startswith(f"{path}: {problem}")
    assert found.endswith("; name the original checkpoint in option.model_id")


def test_files_that_are_cut(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    (fault,) = explain(inspected(tmp_path)).files
    assert fault == f"{path}: has {len(whole) - 10} bytes, and by its header it should have {len(whole)}; copy it again"
    for cut in (b"", b"GGUF", whole[:40], whole[:200], b"version https://git-lfs.github.com/spec/v1\n"):
        path.write_bytes(cut)
        with pytest.raises(ConfigurationError, match=r"m\.gguf: is no file in GGUF, or is cut within its header"):
            read_gguf(path)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        (
            {"without": ["embedding_length"]},
            "has no key llama.embedding_length, without which the model cannot be made",
        ),
        (
            {"architecture": "gemma2", "without": [f"blk.{number}.post_ffw_norm.weight" for number in (0, 1)]},
            "has no tensor blk.0.post_ffw_norm.weight",
        ),
        ({"without": ["attention.head_count"]}, "has no key llama.attention.head_count"),
        ({"layers": 1}, "block_count = 2, but the file has tensors of 1 layers; the file is damaged, fetch it again"),
        ({"without": ["output_norm.weight"]}, "has no tensor output_norm.weight; the file is damaged"),
        ({"without": ["blk.1.attn_q.weight"]}, "has no tensor blk.1.attn_q.weight; the file is damaged"),
        ({"without": ["blk.0.ffn_gate.weight"]}, "has no tensor blk.0.ffn_gate.weight"),
        ({"without": [f"blk.{number}.ffn_norm.weight" for number in (0, 1)]}, "has no tensor blk.0.ffn_norm.weight"),
        (
            {"shapes": {"attn_q": (32, 48)}},
            "tensor blk.0.attn_q.weight is 48 x 32, and llama.embedding_length = 32 is not its first size; the file",
        ),
        (
            {"shapes": {"ffn_down": (48, 32)}},
            "tensor blk.0.ffn_down.weight is 32 x 48, and llama.feed_forward_length = 48 is not its first size",
        ),
        ({"shapes": {"attn_output": (16, 32)}}, "32 x 16, and llama.embedding_length = 32 is not its second size"),
        ({"shapes": {"attn_output": (32,)}}, "is 32, and llama.embedding_length = 32 is not its second size"),
        ({"shapes": {"token_embd.weight": (4, 32)}}, "tensor token_embd.weight is 32 x 4, and the file has 3 tokens"),
        (
            {"shapes": {"blk.1.attn_k.weight": (16, 32)}},
            "tensor blk.1.attn_k.weight is 32 x 16, and 32 x 32 in another layer",
        ),
        (
            {"tokenizer": "bert"},
            "tokenizer.ggml.model = bert is not read from GGUF; allowed: gemma4, gpt2, llama, t5; or put the"
            " tokenizer.json of the original model beside the file",
        ),
        ({"tokenizer": "gpt2"}, "tokenizer.ggml.pre =  is not known; put the tokenizer.json of the original model"),
        ({"without": ["tokens"]}, "has no tokenizer.ggml.tokens; put the tokenizer.json of the original model beside"),
        (
            {"scores": 0},
            "has no tokenizer.ggml.merges and no tokenizer.ggml.scores; put the tokenizer.json of the original model",
        ),
        ({"scores": 0, "tokenizer": "t5", "merges": True}, "has no tokenizer.ggml.scores; put the tokenizer.json of"),
        ({"scores": 2}, "has 3 tokenizer.ggml.tokens and 2 tokenizer.ggml.scores; put the tokenizer.json of"),
    ],
)
def test_what_a_header_lacks_or_contradicts_is_a_fault_of_the_file(
    tmp_path: Path, changes: dict[str, Any], fault: str
) -> None:
    path = write_gguf(tmp_path / "m.gguf", **changes)
    (found,) = explain(inspected(tmp_path)).files
    assert found.startswith(f"{path}: ")
    assert fault in found


def test_a_tokenizer_beside_the_file_takes_the_place_of_its_own(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", tokenizer="bert", without=["tokens"])
    (tmp_path / "tokenizer.json").write_text("{}")
    assert not [line for line in explain(inspected(tmp_path)).files if "ggml" in line]


@pytest.mark.parametrize(
    "changes",
    [
        {"scores": 3},
        {"scores": 0, "merges": True},
        {"scores": 0, "architecture": "gemma2"},
        {"scores": 3, "tokenizer": "t5"},
        {"scores": 0, "merges": True, "tokenizer": "gemma4"},
    ],
)
def test_a_tokenizer_that_the_file_has_whole_is_read(changes: dict[str, Any], tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", **changes)
    assert read_gguf(path).fault(path) is None


@pytest.mark.parametrize("architecture", ["qwen2moe", "qwen3", "stablelm", "gemma2"])
def test_a_whole_file_has_no_fault(tmp_path: Path, architecture: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", architecture)
    assert read_gguf(path).fault(path) is None


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_is_refused_without_opening_it(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "m.gguf")
    with pytest.raises(ConfigurationError, match=r"m\.gguf: is no file; put a model in GGUF there"):
        inspected(tmp_path)


@pytest.mark.parametrize("name", ["m.gguf", "config.json"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / name
    path.touch()
    real_open = Path.open

    def open_for_another_user(self: Path, *arguments: Any, **named: Any) -> Any:
        if self == path:
            raise PermissionError(errno.EACCES, "Permission denied")
        return real_open(self, *arguments, **named)

    monkeypatch.setattr(Path, "open", open_for_another_user)
    with pytest.raises(ConfigurationError, match=rf"{re.escape(name)}: cannot be read: Permission denied"):
        inspected(tmp_path)


@pytest.mark.parametrize("model_id", ["s3://bucket/m.gguf", "owner/name.gguf"])
def test_what_is_still_to_be_fetched_is_not_read(tmp_path: Path, model_id: str) -> None:
    found = inspected(tmp_path, f"option.model_id={model_id}")
    assert (found.location, found.problems) == (model_id, ())


def test_values_that_no_writer_would_write(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    key = b"general.alignment"
    path.write_bytes(b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, len(key)) + key + struct.pack("<II", 4, 0))
    with pytest.raises(ConfigurationError, match=r"general\.alignment = 0 is no power of two; the file is damaged"):
        read_gguf(path)


U32, U64, F32 = struct.Struct("<I").pack, struct.Struct("<Q").pack, struct.Struct("<f").pack
STRINGS = U32(8)


@pytest.mark.parametrize(
    ("keys", "tensors", "counts", "problem"),
    [
        ([], [], (0, 2**63), "has 9223372036854775808 keys in its header, and 4096 are the most that is read"),
        ([], [], (2**40, 0), "has 1099511627776 tensors in its header, and 16384 are the most"),
        ([key_of("a", 9, STRINGS + U64(2**36))], [], None, "has 68719476736 elements of arrays in its header"),
        ([key_of("a", 9, U32(12) + U64(2**61))], [], None, "elements of arrays in its header, and 4194304 are"),
        ([key_of(name, 9, U32(0) + U64(2**21) + bytes(2**21)) for name in "abc"], [], None, "has 6291456 elements"),
        ([U64(2**60)], [], None, "has 1152921504606846976 bytes in a name in its header"),
        ([key_of("a", 8, U64(2**63))], [], None, "is no file in GGUF, or is cut within its header"),
        ([key_of("a", 9, U32(9) + U64(1) + U32(4) + U64(0))], [], None, "is no file in GGUF"),
        ([key_of("a", 13, b"")], [], None, "is no file in GGUF"),
        ([key_of("\n", 4, U32(1))] * 2, [], None, r"has the key \\n twice"),
        (
            [key_of("llama.rope.freq_base", 6, F32(float("nan")))],
            [],
            None,
            "freq_base = nan is no number",
        ),
        ([key_of("general.alignment", 4, U32(24))], [], None, r"general\.alignment = 24 is no power of two"),
        ([key_of("general.alignment", 6, F32(32.0))], [], None, r"general\.alignment = 32\.0 is no power"),
        ([], [tensor_of("a", 0), tensor_of("a", 32)], None, "has the tensor a twice"),
        ([], [tensor_of("a", 1)], None, "tensor a begins at 1, which is no multiple of 32"),
        ([], [tensor_of("b", 32), tensor_of("a", 0, (9,))], None, "tensor b begins inside of tensor a"),
        ([], [tensor_of("a", 0, (2**63,) * 4), tensor_of("b", 32)], None, "tensor b begins inside of tensor a"),
    ],
)
def test_a_hostile_header_is_refused_with_the_reason(
    tmp_path: Path, keys: list[bytes], tensors: list[bytes], counts: tuple[int, int] | None, problem: str
) -> None:
    path = hostile_gguf(tmp_path / "m.gguf", keys, tensors, counts)
    with pytest.raises(ConfigurationError, match=f"{re.escape(str(path))}: .*{problem}"):
        read_gguf(path)


@pytest.mark.parametrize("tensor", [tensor_of("a", 2**64 - 32), tensor_of("a", 0, (2**33, 2**31)), tensor_of("a", 160)])
def test_a_tensor_outside_of_the_file_is_a_fault_of_the_file(tmp_path: Path, tensor: bytes) -> None:
    path = hostile_gguf(tmp_path / "m.gguf", tensors=[tensor])
    fault = read_gguf(path).size_fault(path.stat().st_size)
    assert fault is not None
    assert fault.startswith(f"has {path.stat().st_size} bytes, and by its header it should have ")


def test_the_estimate_counts_blocks_as_a_cpu_holds_them(tmp_path: Path) -> None:
    q5_0, q8_0 = 6, 8
    tensors = [tensor_of("token_embd.weight", 0, (32, 2), q8_0), tensor_of("q", 96, (32,), q5_0), tensor_of("n", 128)]
    keys = [key_of("general.architecture", 8, U64(5) + b"llama")]
    hostile_gguf(tmp_path / "m.gguf", keys, tensors)
    gpu = Machine(2**34, 2**34, gpus=(Gpu("0", 2**34, 2**34),), engines=ENGINES)
    in_blocks, unpacked = 68 + 68 + 34 + 16, 2 * (64 + 32 + 8)
    for line, machine, held in (("", NO_GPU, in_blocks), ("option.dtype=bf16", NO_GPU, unpacked), ("", gpu, unpacked)):
        assert explain(inspected(tmp_path, line, machine=machine)).memory["weights_bytes"] == held


def test_a_name_of_an_architecture_is_quoted_in_short(tmp_path: Path) -> None:
    name = "\x1b[2J" + "a" * 100_000
    path = hostile_gguf(tmp_path / "m.gguf", [key_of("general.architecture", 8, U64(len(name)) + name.encode())])
    problem = read_gguf(path).problem()
    assert problem is not None
    assert problem.isprintable()
    assert len(problem) < 1000


def test_a_tensor_has_four_dimensions_at_most(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    for dimensions in (4, 5):
        tensor = struct.pack(f"<I{dimensions}QIQ", dimensions, *[2] * dimensions, 0, 0)
        path.write_bytes(b"GGUF" + struct.pack("<IQQQ", 3, 1, 0, 1) + b"a" + tensor)
        if dimensions == 4:
            assert read_gguf(path).parameters == 16
    with pytest.raises(ConfigurationError, match="is no file in GGUF"):
        read_gguf(path)
