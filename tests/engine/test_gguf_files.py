"""GGUF files that are no model, or hold more than their header says: refused before anything is made of them. And one
that is loaded is read once."""

import struct

import pytest
import torch
from engine_models import build
from test_weights import load, write_gguf


@pytest.mark.parametrize(
    "kind,said",
    [
        ("adapter", r"of the type adapter \(lora\), expected a model: merge it into its base model"),
        ("mmproj", "of the type mmproj, expected a model: images are taken of a directory of safetensors"),
        ("imatrix", "of the type imatrix, expected a model: load the model's own file"),
    ],
)
def test_gguf_of_what_is_no_model(kind, said, tmp_path):
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "llama")
    writer.add_type(kind)
    if kind == "adapter":
        writer.add_string("adapter.type", "lora")
        writer.add_float32("adapter.lora.alpha", 16.0)
    for half, shape in (("a", (4, 64)), ("b", (64, 4))):
        writer.add_tensor(f"blk.0.attn_q.weight.lora_{half}", torch.zeros(shape).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match=rf"m.gguf: got a GGUF file {said}"):
        load(tmp_path / "m.gguf")


def test_gguf_whose_header_counts_a_tensor_fewer(tmp_path):
    """All others would be read from a wrong place, or a head be taken for tied."""
    write_gguf(tmp_path / "m.gguf", build("Llama", torch.float32, vocab_size=261, head_dim=12))
    whole = (tmp_path / "m.gguf").read_bytes()
    (count,) = struct.unpack_from("<Q", whole, 8)
    (tmp_path / "m.gguf").write_bytes(whole + bytes(4096))
    load(tmp_path / "m.gguf")  # zeros at the end are nothing
    for damaged in (whole[:8] + struct.pack("<Q", count - 1) + whole[16:], whole + b"x" * 40):
        (tmp_path / "m.gguf").write_bytes(damaged)
        with pytest.raises(ValueError, match=r"m.gguf: \d+ bytes of it, not zeros, are of none of the \d+ tensors"):
            load(tmp_path / "m.gguf")


def test_gguf_is_read_once(tmp_path, monkeypatch):
    gguf = pytest.importorskip("gguf")
    model = build("Llama", torch.float32, vocab_size=261, head_dim=12)
    write_gguf(tmp_path / "m.gguf", model)
    made = []
    for name in ("GGUFReader", "get_tensor_name_map"):
        own = getattr(gguf, name)
        monkeypatch.setattr(gguf, name, lambda *of, own=own, name=name: made.append((name, *of)) or own(*of))
    for changed in (False, True):
        before = gguf.GGUFReader, gguf.get_tensor_name_map
        found = load(tmp_path, dtype="float32")
        assert all(torch.equal(a, b) for a, b in zip(found.model.parameters(), model.parameters()))
        assert len(made) == len(set(made)) >= 2  # of a file, and of an architecture's layers
        assert (gguf.GGUFReader, gguf.get_tensor_name_map) == before
        made.clear()
        if not changed:  # another file of the same name is another one
            model = build("Llama", torch.float32, vocab_size=261, head_dim=12, seed=1)
            write_gguf(tmp_path / "m.gguf", model)
    (tmp_path / "m.gguf").write_bytes((tmp_path / "m.gguf").read_bytes()[:900])
    with pytest.raises(ValueError):
        load(tmp_path, dtype="float32")
    assert (gguf.GGUFReader, gguf.get_tensor_name_map) == before
