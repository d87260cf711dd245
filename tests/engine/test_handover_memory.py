"""Memory of another GPU in the hands of one's own: whose tensors it is, and when it may go."""

import ctypes
import gc

import pytest
import torch

from vexact_engine import HandoverFailed
from vexact_engine.handover import buffers


def test_bytes_at_an_address_are_a_tensor_until_the_last_view_is_gone(monkeypatch):
    monkeypatch.setattr(buffers, "_DL_CUDA", 1)  # dlpack.h: a CPU
    memory = (ctypes.c_uint8 * 64)(*range(64))
    found = buffers._bytes_at(ctypes.addressof(memory), 64, torch.device("cpu", 0))
    assert found.dtype == torch.uint8 and found.tolist() == list(range(64))
    assert found.data_ptr() == ctypes.addressof(memory)
    view = found[8:16].view(torch.int32)
    found[8] = 100
    assert memory[8] == 100 and view.shape == (2,)
    before = len(buffers._exported)
    del found
    gc.collect()
    assert len(buffers._exported) == before
    del view
    gc.collect()
    assert len(buffers._exported) == before - 1


@pytest.mark.parametrize(
    "device, whose, reaches, reader",
    [
        ("cuda:1", 1, set(), "cuda:1"),
        ("cuda", 0, set(), "cuda:0"),
        ("cuda:1", 0, {(1, 0)}, "cuda:1"),
        ("cuda:1", 0, {(0, 1)}, "cuda:0"),  # the other way alone: copied from its owner's side, as without links
        ("cuda", 3, {(0, 3)}, "cuda:0"),
        ("cpu", 2, set(), "cuda:2"),
    ],
)
def test_who_reads_a_bucket(monkeypatch, device, whose, reaches, reader):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: (a, b) in reaches)
    assert buffers._reader(torch.device(device), torch.device("cuda", whose)) == torch.device(reader)


def test_a_bucket_is_opened_by_who_reads_it(monkeypatch):
    """And its tensor is the reader's."""
    opened = []

    class Memory:
        def __init__(self, device):
            self.device = device

        @classmethod
        def opened(cls, handle, size, device):
            opened.append((handle, size, device))
            return cls(device)

        def tensor(self):
            return torch.empty(0)

        def close(self):
            opened.append("closed")

    monkeypatch.setattr(buffers, "_CudaMemory", Memory)
    monkeypatch.setattr(buffers, "gpu_named", lambda name: torch.device("cuda", 0) if name == "seen" else None)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: True)
    found = buffers.OpenedBuckets(buffers.CUDA, "name", 64, [b"a", b"b"], "seen", torch.device("cuda", 1))
    assert opened == [(b"a", 64, torch.device("cuda", 1)), (b"b", 64, torch.device("cuda", 1))]
    found.close()
    assert opened[2:] == ["closed", "closed"]
    with pytest.raises(HandoverFailed, match="does not see the GPU hidden"):
        buffers.OpenedBuckets(buffers.CUDA, "name", 64, [b"a"], "hidden", torch.device("cuda", 1))
