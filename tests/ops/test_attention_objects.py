"""Kernels of the CuTe stack that are kept on disk: loaded ones have the bits of those just compiled, and a file
that is not whole is made again."""

import pytest
import torch

import vexact_ops as vx
from vexact_ops.attention.op import ROOM
from vexact_ops.testing import Pages, assert_bitwise, attention_inputs, offsets

try:
    from flash_attn.cute import interface

    from vexact_ops.attention import cute_objects
except ImportError as error:
    pytest.skip(f"the CuTe stack is not installed ({error.name}), on CUDA alone", allow_module_level=True)

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible to torch"),
]
KINDS = [
    pytest.param((128, 128), {}, id="d128"),
    pytest.param((64, 64), {"window": 50}, id="d64-window"),
    pytest.param((192, 128), {"kv_segment": 256}, id="d192x128-segments"),
]


@pytest.fixture
def objects(tmp_path, monkeypatch):
    """A folder of its own, and a way to forget what this process holds; yields the files that there are."""
    if "cuda" not in ROOM.backends("cuda"):
        pytest.skip("no CUDA kernels")
    monkeypatch.setenv("VEXACT_CACHE", str(tmp_path))
    monkeypatch.setattr(cute_objects, "_kernels", {})
    monkeypatch.setattr(cute_objects, "_modules", held := [])
    yield lambda: sorted((tmp_path / "kernels").glob("*.[so]*"))
    _HELD.extend(held)  # a function lives no longer than what it was loaded from


_HELD = []


def everything(dims, options):
    """Training forward, gradients, the same from pages."""
    # Enough queries and keys for the kernels of the CuTe stack, and, but for windows, so many sequences that blocks of
    # theirs are looked up.
    lengths = [1500, 1, 700, *[5] * (0 if "window" in options else 300)]
    q, k, v = attention_inputs(lengths, 8, 2, *dims, seed=3, dtype=torch.bfloat16, device="cuda")
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    cu = offsets(lengths, "cuda")
    out = vx.attention_varlen(q, k, v, cu, max(lengths), **options)
    grads = torch.autograd.grad(
        out, (q, k, v), torch.cos(torch.arange(out.numel(), device="cuda")).view_as(out).bfloat16()
    )
    q, k, v = (x.detach() for x in (q, k, v))
    pages = Pages.of(k, v, lengths, 64).put(k, v)
    context = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    paged = vx.attention_paged(q, pages.k_cache, pages.v_cache, pages.block_table, context, cu, max(lengths), **options)
    assert_bitwise(paged, out.detach(), "from pages")
    return out.detach(), *grads, paged


@pytest.mark.parametrize("dims,options", KINDS)
def test_loaded_kernels_have_the_bits_of_compiled_ones(dims, options, objects, monkeypatch):
    interface._bwd_postprocess_convert.compile_cache.clear()
    everything(dims, options)  # settles what serves it
    cute_objects._kernels.clear()
    for path in objects():
        path.unlink()
    expected = everything(dims, options)
    if not cute_objects._kernels:
        pytest.skip("no SM90: nothing of the CuTe stack serves this GPU")
    made, names = objects(), sorted(key[0] for key in cute_objects._kernels)
    assert len(made) == len(names) and {"forward", "paged"} <= set(names)
    if "backward" in names:  # what flash-attn-4 keeps itself, every process would compile
        assert {"backward, after", "blocks"} <= set(names)
        assert not interface._bwd_postprocess_convert.compile_cache.cache

    def never():
        raise AssertionError("it was compiled again")

    cute_objects._kernels.clear()
    of_now = cute_objects.kernel
    monkeypatch.setattr(
        cute_objects, "kernel", lambda name, device, key, _, versions: of_now(name, device, key, never, versions)
    )
    assert_bitwise(everything(dims, options), expected)
    assert len(cute_objects._modules) == len(names) and objects() == made


def test_a_file_that_is_not_whole_is_made_again(objects):
    expected = everything((128, 128), {})
    whole = {path: path.stat().st_size for path in objects()}
    for path in whole:
        path.write_bytes(path.read_bytes()[:1000])
    cute_objects._kernels.clear()
    assert_bitwise(everything((128, 128), {}), expected)
    assert all(path.stat().st_size > 2000 for path in whole) and cute_objects._modules == []
