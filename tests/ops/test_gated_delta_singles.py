"""gated_delta: a call that knows how many of its sequences have one row and come first has the bits of one that does
not, and its blocks of chunks are of the others alone."""

import itertools

import pytest
import torch
from conftest import interpreted, room_backends
from hypothesis import example, given
from hypothesis import strategies as st
from test_causal_conv import check_singles
from test_gated_delta import DTYPES, KINDS, ints, offsets, rows_of

import vexact_ops as vx
from vexact_ops._core.admit import canonical_by_rule
from vexact_ops.testing import assert_bitwise

BACKENDS = pytest.mark.parametrize("device,backend", room_backends("gated_delta"))


def going_on(lengths, heads, dims, dtype, device, seed):
    """rows, memory and (slots, lens, offsets) of a call whose sequences are new and old, at all kinds of places in a
    chunk, one of them without a slot."""
    rows, draw = rows_of(sum(lengths), heads, dims, dtype, device, seed), torch.Generator().manual_seed(seed)
    (hk, hv), (dk, dv), count = heads, dims, len(lengths) + 2
    before = torch.tensor([0, 1, 15, 62, 63, 64, 100, 127])[torch.randint(8, (len(lengths),), generator=draw)]
    shapes = (hv, dk, dv), (64, hk, dk), (64, hv, dv), (64, hv)
    memory = [torch.randn(count, *shape, generator=draw) for shape in shapes]
    memory[1], memory[3] = memory[1].to(dtype), -memory[3].abs()
    slots = torch.randperm(count, generator=draw)[: len(lengths)]
    slots[torch.randint(len(lengths), (1,), generator=draw)] = -1
    lens = (before + torch.tensor(lengths)).tolist()
    step = ints(device, *slots.tolist()), ints(device, *lens), offsets(device, lengths)
    return rows, [t.to(device) for t in memory], step


@BACKENDS
@DTYPES
@example(kind=0, ones=2, behind=[2, 3], seed=0)
@given(
    kind=KINDS.drawn,
    ones=st.integers(1, 4),
    behind=st.lists(st.sampled_from([0, 1, 2, 17, 63, 64, 65, 130]), max_size=3),
    seed=st.integers(0, 2**16),
)
def test_single_rows_that_come_first_on_a_gpu_change_nothing(device, backend, dtype, kind, ones, behind, seed):
    """Outputs and memory; behind them single rows may stand too, and sequences without any."""
    kind = KINDS.at(kind, device, dtype)
    if interpreted(device, backend):
        ones, behind = min(ones, 2), [min(n, 3) for n in behind[:2]]
    lengths = [*[1] * ones, *behind]
    rows, memory, step = going_on(lengths, kind.heads, kind.dims, dtype, device, seed)

    def run(singles):
        held = [t.clone() for t in memory]
        return vx.gated_delta_paged(*rows, *held, *step, max(lengths), singles=singles, backend=backend), *held

    check_singles(run, next((i for i, length in enumerate(lengths) if length != 1), len(lengths)))


@pytest.mark.parametrize("cut_alike", [True, False])
def test_slots_that_are_not_cut_as_rows_are_are_caught(cut_alike):
    """What a kernel does that trusts the number: the first sequences by one call, the others by another."""
    lengths = [1, 1, 1, 70, 2]
    rows, memory, (slots, lens, cu) = going_on(lengths, (1, 2), (16, 16), torch.float32, "cpu", 16)

    def run(singles):
        held, shift, outs = [t.clone() for t in memory], 0 if cut_alike or not singles else 1, []
        for part, ends in ((slice(0, singles), cu[: singles + 1]), (slice(singles, None), cu[singles:] - singles)):
            own = slots.roll(shift)[part], lens[part], ends
            outs.append(vx.gated_delta_paged(*(x[part] for x in rows), *held, *own, 70))
        return torch.cat(outs), *held

    if cut_alike:
        check_singles(run, 3)
    else:
        with pytest.raises(AssertionError, match="differ"):
            check_singles(run, 3)


def test_wrong_numbers_are_named():
    rows, memory, (slots, _, _) = going_on([5, 0], (1, 2), (16, 16), torch.float32, "cpu", 18)
    before, op = [t.clone() for t in memory], "gated_delta_paged"
    for singles, cu, message, kind in (
        (1, (0, 3, 5), "got 1, expected at most 0: sequence 0 has 3 rows", ValueError),
        (2, (0, 1, 5), "got 2, expected at most 1: sequence 1 has 4 rows", ValueError),
        (2, (0, 0, 5), "got 2, expected at most 0: sequence 0 has 0 rows", ValueError),
        (3, (0, 1, 5), "got 3, expected 0 to 2, the sequences", ValueError),
        (-1, (0, 1, 5), "got -1, expected 0 to 2", ValueError),
        (True, (0, 1, 5), "got bool, expected an int", TypeError),
        (1.0, (0, 1, 5), "got float, expected an int", TypeError),
    ):
        with pytest.raises(kind, match=f"{op}: singles: {message}"):
            vx.gated_delta_paged(*rows, *memory, slots, ints("cpu", 9, 9), ints("cpu", *cu), 5, singles=singles)
    assert_bitwise(memory, before)  # nothing was written


class Kernels:
    """Stand for those of SM90: what they leave to each other they leave, and the rest a CPU computes. Of a call of
    chunks: how many sequences it was given, and the bytes of what is prepared for them."""

    def __init__(self):
        self.chunked = []

    def decode(self, *args):
        *rows, state, open_k, open_u, open_g, slots, lens, cu, scale, l2norm, _, _, _, out = args
        self._compute(rows, (state, open_k, open_u, open_g), (slots, lens, cu), scale, l2norm, out, lambda n: n == 1)

    def chunks(self, *args):
        *rows, cu = args[:6]
        *memory, slots, lens, prepared, scale, l2norm, _, out = args[10:]
        assert args[6:10] == (None,) * 4
        self.chunked.append((len(slots), None if prepared is None else prepared.numel()))
        self._compute(rows, memory, (slots, lens, cu), scale, l2norm, out, lambda n: n > 1)

    @staticmethod
    def _compute(rows, memory, step, scale, l2norm, out, wanted):
        slots, lens, cu = step
        assert len(slots) == len(lens) == len(cu) - 1
        for b, (begin, end) in enumerate(itertools.pairwise(cu.tolist())):
            if wanted(end - begin):
                own = slots[b : b + 1], lens[b : b + 1], cu.new_tensor([0, end - begin]), end - begin
                given = (x[begin:end] for x in rows)
                out[begin:end] = vx.gated_delta_paged(*given, *memory, *own, scale=scale, qk_l2norm=l2norm)


@pytest.mark.parametrize("name", ["32", "32 wide"])
@pytest.mark.parametrize("behind", [(70, 2), (65, 1, 0, 3, 1), ()], ids=str)
def test_chunks_are_of_the_sequences_behind_single_rows(name, behind, monkeypatch):
    """A block of chunks takes most of a multiprocessor, whether it has something to do or not."""
    from vexact_ops.gated_delta import cuda, triton

    lengths, kernels, asked, appended = [1, 1, 1, *behind], Kernels(), [], []
    rows, memory, step = going_on(lengths, (1, 2), (16, 32), torch.bfloat16, "cpu", 17)
    monkeypatch.setattr(cuda, "_native", lambda: kernels)
    monkeypatch.setattr(triton, "append", lambda *args: appended.append(args[-1]))  # a CPU's kernel has done that
    monkeypatch.setattr(cuda.gpu, "multiprocessors", lambda device: 132)

    def route(call):
        asked.append((call.part, call.heads))
        return canonical_by_rule(f"sm90 {call.part} {'64' if call.part == 'decode' else name}", "for the test")

    monkeypatch.setattr(cuda, "route", route)
    held = [t.clone() for t in memory]
    longest, count = max(lengths), len(lengths)
    expected = vx.gated_delta_paged(*rows, *held, *step, longest), *held
    for singles in range(4):
        asked.clear(), appended.clear(), kernels.chunked.clear()
        held = [t.clone() for t in memory]
        out = cuda.paged_fwd(*rows, *held, *step, longest, singles, 16**-0.5, True)
        assert_bitwise((out, *held), expected, f"{singles}")
        left = count - singles
        parts = [("decode", 2 * count), ("chunks", 2 * left)][: 1 + (longest > 1)]
        assert asked == parts
        size = (sum(lengths) // 64 + left) * 2 * cuda.PREPARED if name == "32 wide" else None
        assert kernels.chunked == [(left, size)][: len(parts) - 1]
        assert appended == [singles][: len(parts) - 1]
        given = dict(zip(("state", "open_k", "open_u", "open_g"), memory))
        given |= {"slots": step[0], "max_seqlen_q": longest, "singles": singles, "l2norm": True}
        found = cuda.explain("gated_delta_paged", **dict(zip("qkv", rows)), **given)
        assert [part for part, _ in found] == [part for part, _ in parts] and asked == 2 * parts


def test_blocks_are_few_where_all_but_a_few_have_a_single_row(monkeypatch):
    from vexact_ops.gated_delta import cuda

    seen = []
    monkeypatch.setattr(cuda, "_decision", lambda *of: seen.append(of[-2]))
    monkeypatch.setattr(cuda.gpu, "not_sm90", lambda device: None)
    monkeypatch.setattr(cuda.gpu, "multiprocessors", lambda device: 132)
    q, v = torch.zeros(2048, 16, 128, dtype=torch.bfloat16), torch.zeros(2048, 32, 128, dtype=torch.bfloat16)
    for singles in (0, 250, 252, 256):
        for part, count in cuda._parts(1024, 256, singles):
            cuda.route(cuda.Call.of(part, q, q, v, True, count))
    assert seen == [False, True, False, True, False, False, False]  # of single rows, of chunks; at last of those alone


@pytest.mark.parametrize("of", ["decode", "step"])
def test_few_single_rows_are_raced_by_how_many_they_are(of, monkeypatch):
    """So that a graph takes the kernel for the rows that it was captured with, in mixed steps too."""
    from vexact_ops.gated_delta import cuda

    seen = []
    monkeypatch.setattr(cuda, "_decision", lambda device, part, *sizes: seen.append((part, sizes[-3])))
    monkeypatch.setattr(cuda.gpu, "not_sm90", lambda device: None)
    monkeypatch.setattr(cuda.gpu, "multiprocessors", lambda device: 132)

    def classes(rows, hv=32, d=128):
        seen.clear()
        for count in rows:
            cuda.route(cuda.Call(of, torch.device("cpu"), torch.bfloat16, hv // 2, hv, d, d, True, count * hv))
        assert {part for part, _ in seen} == {of}
        return [few for _, few in seen]

    assert classes([1, 2, 3, 4, 5, 256]) == [1, 2, 4, 4, 0, 0]
    assert classes([1, 2, 3, 4, 5, 8, 9], hv=16) == [2, 2, 4, 4, 8, 8, 0]
    assert classes([1, 2, 3], hv=128) == [1, 0, 0], "a row has more than half a block a multiprocessor, and than one"
    assert classes([1, 2, 3], d=64) == [0, 0, 0]
    seen.clear()
    cuda.admit(16, 32, 128, 128, torch.bfloat16, "cpu")
    assert [few for part, few in seen if part == of] == [0, 1, 2, 4]
