"""The package gguf as lmi_server/processes/gguf_package.py prepares it gives what it gives by itself."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from lmi_server.processes import gguf_package


@pytest.fixture
def file(tmp_path: Path) -> Path:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_block_count(2)
    writer.add_token_list(["a", "b\n", "é"])
    writer.add_token_scores([0.5, -1.0, 2.0])
    writer.add_tensor("blk.0.attn_q.weight", np.arange(64, dtype=np.float32).reshape(2, 32))
    writer.add_tensor("output.weight", np.arange(34, dtype=np.uint8)[None], raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "model.gguf"


def test_a_prepared_reader_reads_the_same(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(monkeypatch)
    plain, prepared = gguf.gguf_reader.GGUFReader(file), gguf.GGUFReader(file)
    assert prepared.fields.keys() == plain.fields.keys()
    contents = [{key: field.contents() for key, field in reader.fields.items()} for reader in (prepared, plain)]
    assert contents[0] == contents[1]
    assert [field.types for field in prepared.fields.values()] == [field.types for field in plain.fields.values()]
    assert contents[0]["tokenizer.ggml.scores"] == [0.5, -1.0, 2.0]
    assert contents[0]["tokenizer.ggml.tokens"] == ["a", "b\n", "é"]
    for one, other in zip(prepared.tensors, plain.tensors, strict=True):
        assert (one.name, one.tensor_type, one.data_offset) == (other.name, other.tensor_type, other.data_offset)
        assert type(one.data) is np.ndarray
        assert np.array_equal(one.data, other.data)


@pytest.mark.parametrize("key", ["tokens", "scores"])
def test_an_array_that_is_longer_than_its_file_is_refused(
    file: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    prepare(monkeypatch)
    data = bytearray(file.read_bytes())
    length = data.index(f"tokenizer.ggml.{key}".encode()) + len(f"tokenizer.ggml.{key}") + 8  # two types of 4 bytes
    assert data[length : length + 8] == (3).to_bytes(8, "little")
    data[length : length + 8] = (2**40).to_bytes(8, "little")
    file.write_bytes(data)
    with pytest.raises(ValueError, match=r"ends within|its size must be a divisor"):
        gguf.GGUFReader(file)


def test_a_table_of_names_is_made_once_for_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(monkeypatch)
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    gguf_package.prepare()
    assert gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2) is table
    assert table.mapping == made_anew(gguf.MODEL_ARCH.LLAMA, 2).mapping
    assert gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 3).mapping != table.mapping


def prepare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prepare the package for this test alone, whatever has prepared it before."""
    monkeypatch.setattr(gguf, "GGUFReader", gguf.gguf_reader.GGUFReader)
    monkeypatch.setattr(gguf, "get_tensor_name_map", made_anew)
    gguf_package.prepare()


def made_anew(architecture: gguf.MODEL_ARCH, blocks: int) -> gguf.TensorNameMap:
    return gguf.TensorNameMap(architecture, blocks)
