"""The small kernels around a forward move the bytes that torch's would. In Triton's interpreter, or on a GPU."""

import os

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from vexact_engine.runner import triton as kernels

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
WHERE = [
    pytest.param("cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1"), id="cpu-triton"),
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"), id="cuda-triton"
    ),
]
SIZES = [(1, 1, 40, 48), (5, 7, 33, 1500), (64, 64, 16, 2048), (300, 11, 1100, 65)]  # tokens, sequences, pages, width


@pytest.fixture(params=WHERE)
def random(request):
    g = torch.Generator().manual_seed(0)

    def draw(low, high, *shape, dtype=torch.int64):
        return torch.randint(low, high, shape, generator=g, dtype=dtype).to(request.param)

    return draw


@pytest.mark.parametrize("tokens, sequences, pages, width", SIZES)
def test_ids_and_pages_are_gathered(tokens, sequences, pages, width, random):
    words, sources = random(-1, 1000, 2000), random(0, 2000, tokens)
    table, slots = random(0, 9999, sequences + 3, pages + 19, dtype=torch.int32), random(0, sequences + 3, sequences)
    words[sources[0]] = -1
    for asked in (pages, pages + 19):
        ids, found = kernels.inputs(words, sources, table, slots, asked)
        assert torch.equal(ids, words[sources].clamp(min=0)) and ids[0] == 0
        assert torch.equal(found, table[slots, :asked]) and found.is_contiguous()


@pytest.mark.parametrize("tokens, sequences, pages, width", SIZES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_are_taken_as_they_are(tokens, sequences, pages, width, dtype, random):
    kind = torch.int16 if dtype == torch.bfloat16 else torch.int32
    top = torch.iinfo(kind).max
    source, rows = random(-top, top, tokens, width, dtype=kind), random(0, tokens, sequences)  # with NaN of all kinds
    target = torch.zeros(sequences + 1, width, dtype=dtype, device=rows.device)
    kernels.take(source.view(dtype), rows, target[:sequences])
    assert torch.equal(target[:sequences].view(kind), source[rows]) and not target[sequences].any()


@pytest.mark.parametrize("draws", [1, 7, 128, 300])
def test_what_was_drawn_is_noted(draws, random):
    ids, slots = random(-1, 1 << 40, draws), torch.randperm(draws + 2)[:draws]
    slots = slots.to(ids.device)
    values = [random(-(1 << 31), 1 << 31, draws).to(torch.int32) for _ in range(2)]
    last = torch.full((draws + 2,), 5, dtype=torch.int64, device=ids.device)
    drawn = torch.full((4 * draws + 4,), 6, dtype=torch.int32, device=ids.device)
    expected = last.index_copy(0, slots, ids)
    kernels.keep(slots, ids, *(v.view(torch.float32) for v in values), last, drawn)
    assert torch.equal(last, expected)
    assert torch.equal(drawn[: 4 * draws], torch.cat([ids.view(torch.int32), *values]))
    assert (drawn[4 * draws :] == 6).all()
