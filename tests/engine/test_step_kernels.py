"""The small kernels around a forward move the bytes that torch's would. In Triton's interpreter, or on a GPU."""

import math
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from engine_models import bits, build, prompts

pytest.importorskip("triton", reason="triton is not installed")

from vexact_engine import Engine, EngineConfig, SamplingParams, Speculation
from vexact_engine.core.plan import Chunk, StepPlan
from vexact_engine.core.step import COPY, Encoder
from vexact_engine.request import Request
from vexact_engine.runner import graphs
from vexact_engine.runner import triton as kernels
from vexact_engine.runner.buffers import Body, Buffers, Head, _windowed
from vexact_engine.runner.follow import Follow
from vexact_engine.runner.memory import Caches

sys.path.insert(0, str(Path(__file__).parents[1] / "patch"))
from families import family, tiny

sys.path.pop(0)
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
    newest = last.repeat(2)
    drawn = torch.full((4 * draws + 4,), 6, dtype=torch.int32, pin_memory=ids.is_cuda)
    address = torch.tensor([drawn.data_ptr()], device=ids.device)
    expected = last.index_copy(0, slots, ids)
    kernels.keep(slots, ids, *(v.view(torch.float32) for v in values), last, newest, address)
    assert torch.equal(last, expected)
    assert torch.equal(newest[:draws], ids) and (newest[draws:] == 5).all()
    assert torch.equal(drawn[: 4 * draws], torch.cat([ids.view(torch.int32), *values]).cpu())
    assert (drawn[4 * draws :] == 6).all()


def rows_apart(random, line, rows, *shape, dtype):
    """Bytes of all kinds, `line` beyond a place where memory may begin, in rows that do not lie side by side."""
    size = math.prod(shape) * dtype.itemsize
    apart = size + (-size % line) + line
    flat = random(-128, 128, line + rows * apart, dtype=torch.int8)[line:].view(dtype)
    inner = torch.empty(shape, dtype=dtype, device="meta").stride()
    return flat.as_strided((rows, *shape), (apart // dtype.itemsize, *inner))


@pytest.mark.parametrize("line, word", [(16, 8), (8, 8), (4, 4), (2, 2), (1, 1)])
def test_states_are_copied_for_all_layers_at_once(line, word, random):
    """To snapshots and back, wherever the tensors lie: those that slept may have woken up elsewhere."""
    kinds = [((5, 80, 128), torch.float32), ((4, 40), torch.bfloat16), ((48,), torch.int8)]
    kinds = [(shape, dtype if dtype.itemsize <= line else torch.int8) for shape, dtype in kinds]

    def layers(rows):
        each = [[rows_apart(random, line, rows, *shape, dtype=dtype) for shape, dtype in kinds] for _ in range(2)]
        return [each[0], None, each[1]]

    slots, snapshots = layers(5), layers(7)
    buffers = Buffers(Caches([], [], slots, snapshots), 3, 5, 8, 4, slots[0][0].device)
    of = [pair for i in (0, 2) for pair in zip(slots[i], snapshots[i])]
    made = kernels.copies_of(of)
    assert (made.line, made.word.primitive_bitwidth) == (line, 8 * word)
    assert made.table[:, 4].sum() * word == sum(one[0].nbytes for one, _ in of) and len(made.table) > len(of)
    for pairs, back in (([(4, 0)], False), ([(0, 6), (3, 1), (1, 5)], True), ([(2, 3), (1, 1)], False)):
        expected = [(one.clone(), other.clone()) for one, other in of]
        for one, other in expected:
            for slot, place in pairs:
                (one if back else other)[slot if back else place] = other[place] if back else one[slot]
        for way in (kernels, None):  # torch's, which changes nothing any more
            buffers._kernels = way
            step = SimpleNamespace(restores=np.array(pairs, COPY), saves=np.array(pairs, COPY))
            (buffers.restore if back else buffers.save)(step)
            for pair, wanted in zip(of, expected):
                assert all(torch.equal(a.view(torch.int8), b.view(torch.int8)) for a, b in zip(pair, wanted))
        for one, _ in of:  # elsewhere
            with torch.no_grad():
                one.set_(rows_apart(random, line, 5, *one.shape[1:], dtype=one.dtype).copy_(one))


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("chunks, most", [(1, 1), (3, 64), (64, 6)])
def test_a_step_behind_drafts_is_moved(chunks, most, apart, random):
    """As on a CPU: drafts of every length, none, some or all of them right, the last of windows with none."""
    device, numbers = random(0, 2, 1).device, random(0, 1 << 30, 6, chunks).cpu().numpy()
    plan, row = StepPlan([], 0, follows=True), 5
    drawn = random(-1, 1 << 20, chunks * (most + 1) + 9)
    for i in range(chunks):
        drafted, count, right = (int(n) % (most + 1) for n in numbers[:3, i])
        if i % 5 == 1:
            drafted = count = most
        draft = (drawn[row : row + drafted].cpu() + (torch.arange(drafted) >= right)).tolist()
        sequence = Request([1], SamplingParams(seed=i)).sequences[0]
        start, pages = int(numbers[3, i]) % 50, [int(n) for n in numbers[4, i] + np.arange(70)]
        own = Chunk(sequence, start, start + 1 + count, True, pages, 0, chunks - 1 - i, slack=drafted)
        own.behind, own.window = (row, tuple(draft)), tuple(range(100, 100 + drafted + count)) if count else ()
        own.draft, row = own.window[:count], row + drafted + 1
        plan.chunks.append(own)
    rows, found = plan.num_tokens, []
    sequences = rows + 4 if apart else chunks + 2
    body, head = Body(rows + 4, sequences, rows + 4, 1 + most, 1, 80, True, apart), Head(rows, plain=False)
    for where in (device, torch.device("cpu")):
        buffers = Buffers(None, 3, chunks, 80, max(rows, len(drawn)) + 8, where)
        buffers._kernels, buffers.drawn[: len(drawn)] = kernels if where is device and not found else None, drawn
        step = Encoder().encode(plan)
        buffers.work(step)
        buffers.send(step, body, head, follow=Follow(plan))
        columns = {**buffers.columns(body), **{f"draw's {k}": v for k, v in buffers.columns(head).items()}}
        found.append({name: column.cpu() for name, column in columns.items() if name != "draw's address"})
    assert {name for name, column in found[0].items() if not torch.equal(column, found[1][name])} == set()


@pytest.mark.parametrize("where", WHERE[:1])
@pytest.mark.parametrize("family", ["Qwen3", "Gemma2"])
def test_an_engine_with_these_kernels_has_the_bits_of_others(family, where, monkeypatch):
    """A GPU's way of steps, with a CPU's ops: new pages in many of them, graphs or none, all kinds of draws, drafts."""
    config = EngineConfig(page_size=4, num_pages=60, max_num_seqs=5, max_num_batched_tokens=16, reserve=0.0)
    config = replace(config, async_scheduling=True, speculation=Speculation(3, sources=("given",), always=True))
    kinds = {}, {"temperature": 0.0}, {"top_k": 7, "num_top_logprobs": 2}, {"num_top_logprobs": 1}
    params = [SamplingParams(max_new_tokens=6 + i, seed=i, ignore_eos=True, **kinds[i % 4]) for i in range(6)]
    begin, got, used = Buffers.__init__, [], {"keep": [], "settle": []}
    for name, calls in used.items():
        kernel = getattr(kernels, name)
        monkeypatch.setattr(kernels, name, lambda *a, kernel=kernel, calls=calls: (calls.append(a), kernel(*a)))

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
        assert bool(used["keep"]) == (way != "torch") and (len(used["settle"]) > 3) == (way != "torch")
        if way == "torch":
            drafts = [[token ^ (place % 4 == 3) for place, token in enumerate(one.token_ids)] for one in done]
            params = [replace(own, draft=[draft]) for own, draft in zip(params, drafts)]
    assert got[0] == got[1] == got[2]


@pytest.mark.parametrize("where", WHERE[:1])
@pytest.mark.parametrize("kind", [family("qwen3_5_text")])
def test_states_from_a_snapshot_have_the_bits_of_others(kind, where, monkeypatch):
    """Of a hybrid that sleeps in between; the kernel is met at the start, before there is a request."""
    config = EngineConfig(page_size=8, num_pages=60, max_num_seqs=4, num_snapshots=6, reserve=0.0)
    asked = [[3 + place % 50 for place in range(length)] for length in (5, 70, 130)]
    params = [SamplingParams(max_new_tokens=6, seed=i, ignore_eos=True) for i in range(3)]
    begin, kernel, calls, got = Buffers.__init__, kernels.copy, [], []

    def with_kernels(self, *args):
        begin(self, *args)
        self._kernels = kernels

    monkeypatch.setattr(kernels, "copy", lambda copies, rows, back: (calls.append(back), kernel(copies, rows, back)))
    for way in ("torch", "kernels"):
        if way == "kernels":
            monkeypatch.setattr(Buffers, "__init__", with_kernels)
        with Engine.from_pretrained(tiny(kind, torch.bfloat16), config=config) as engine:
            assert calls == ([] if way == "torch" else [False])
            for asleep in (False, True):
                got += [[bits(one) for one in engine.generate(asked, params)] for _ in range(2)]
                assert calls == [] if way == "torch" else {False, True} == set(calls[1:])
                if not asleep:
                    engine.sleep()
                    engine.wake_up()
                    del calls[1:]
    assert len(got) == 8 and all(each == got[0] for each in got)
