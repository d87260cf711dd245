"""The small kernels around a forward move the bytes that torch's would. In Triton's interpreter, or on a GPU."""

import os

import pytest
import torch
from engine_models import bits, build, prompts

pytest.importorskip("triton", reason="triton is not installed")

from vexact_engine import Engine, EngineConfig, SamplingParams
from vexact_engine.runner import graphs
from vexact_engine.runner import triton as kernels
from vexact_engine.runner.buffers import Buffers, _windowed

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


@pytest.mark.parametrize("first, end, pages", [(2, 3, 0), (2, 1000, 1), (0, 257, 300), (6, 40, 7)])
def test_a_step_comes_with_its_pages(first, end, pages, random):
    words, table = random(0, 99, 1100), random(0, 99, 20, 40, dtype=torch.int32)
    host = random(-(1 << 62), 1 << 62, 1500).cpu()
    host = host.pin_memory() if words.is_cuda else host
    where = torch.randperm(table.numel())[:pages]
    host[end : end + pages] = where
    found = host.view(torch.int32)[2 * (end + pages) :][:pages].clone().to(table.device)
    expected = words.clone(), table.flatten().index_copy(0, where.to(table.device), found)
    expected[0][first:end] = host[first:end].to(words.device)
    kernels.receive(host, words, table, first, end, pages)
    assert torch.equal(words, expected[0]) and torch.equal(table.flatten(), expected[1])


@pytest.mark.parametrize("tokens, sequences, pages, width", SIZES)
def test_ids_and_pages_are_gathered(tokens, sequences, pages, width, random):
    words, sources = random(-1, 1000, 2000), random(0, 2000, tokens)
    table, slots = random(0, 9999, sequences + 3, pages + 19, dtype=torch.int32), random(0, sequences + 3, sequences)
    words[sources[0]] = -1
    embedding = random(-(1 << 15), 1 << 15, 1000, width + 3, dtype=torch.int16)[:, :width]  # with NaN of all kinds
    for asked, given in ((pages, None), (pages + 19, embedding.view(torch.bfloat16)), (pages, embedding.float())):
        ids, found, embedded = kernels.inputs(words, sources, table, slots, asked, given)
        assert torch.equal(ids, words[sources].clamp(min=0)) and ids[0] == 0
        assert torch.equal(found, table[slots, :asked]) and found.is_contiguous()
        if given is None:
            assert embedded is None
        else:
            assert embedded.dtype == given.dtype and embedded.is_contiguous()
            assert torch.equal(embedded.view(torch.int16), given[ids].contiguous().view(torch.int16))


@pytest.mark.parametrize("tokens, sequences, pages, width", SIZES)
def test_layers_with_a_window_have_pages_beside_others(tokens, sequences, pages, width, random):
    beside, table = random(0, 1 << 20, width, dtype=torch.int32), random(0, width, sequences, pages, dtype=torch.int32)
    places = random(0, 48 * width, tokens)
    places[::3] = -1
    found = kernels.windowed(beside, places, table, 48)
    expected = _windowed(beside, places, table, 48)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(found, expected))
    assert (found[0][::3] == -1).all() and torch.equal(found[1], beside[table.long()])


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
    drawn = torch.full((4 * draws + 4,), 6, dtype=torch.int32, pin_memory=ids.is_cuda)
    address = torch.tensor([drawn.data_ptr()], device=ids.device)
    expected = last.index_copy(0, slots, ids)
    kernels.keep(slots, ids, *(v.view(torch.float32) for v in values), last, address)
    assert torch.equal(last, expected)
    assert torch.equal(drawn[: 4 * draws], torch.cat([ids.view(torch.int32), *values]).cpu())
    assert (drawn[4 * draws :] == 6).all()


@pytest.mark.parametrize("where", WHERE[:1])
@pytest.mark.parametrize("family", ["Qwen3", "Gemma2"])
def test_an_engine_with_these_kernels_has_the_bits_of_others(family, where, monkeypatch):
    """A GPU's way of steps, with a CPU's ops: new pages in many of them, graphs and none, draws of all kinds."""
    config = EngineConfig(page_size=4, num_pages=60, max_num_seqs=5, max_num_batched_tokens=16, reserve=0.0)
    kinds = {}, {"temperature": 0.0}, {"top_k": 7, "num_top_logprobs": 2}, {"num_top_logprobs": 1}
    params = [SamplingParams(max_new_tokens=6 + i, seed=i, ignore_eos=True, **kinds[i % 4]) for i in range(6)]
    begin, got, used = Buffers.__init__, [], []
    keep = kernels.keep
    monkeypatch.setattr(kernels, "keep", lambda *args: (used.append(len(args[0])), keep(*args)))

    def with_kernels(self, *args):
        begin(self, *args)
        self._kernels = kernels

    for way in ("torch", "kernels", "recorded"):
        if way == "kernels":
            monkeypatch.setattr(Buffers, "__init__", with_kernels)
        if way == "recorded":
            monkeypatch.setattr(graphs, "recorder", lambda *_: graphs.HostRecorder())
        with Engine.from_pretrained(build(family), config=config) as engine:
            assert engine.path == "fused" and engine._worker._runner.graphs.captured == (way == "recorded")
            done = engine.generate(prompts(6), params)
            got.append([(bits(one), str(one.top_logprobs)) for one in done])
        assert bool(used) == (way != "torch")
    assert got[0] == got[1] == got[2]
