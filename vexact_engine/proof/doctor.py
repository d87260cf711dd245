"""What this machine can run, and a quick check that the contract holds on it.

The checks are the properties that the test suite proves at length, on small inputs: a row alone and in a batch, other
thread counts, other instruction sets, and attention's three forms against each other. Seconds, not minutes.
"""

import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import metadata

import torch

import vexact_ops as vx
from vexact_ops.patch.admit import Matrix, Needs, needs_of
from vexact_ops.testing import assert_bitwise, cancelling, check_grouped, check_repeatable, check_rows, tricky

from ..runner import saver
from ..weights.config import read_config
from ..weights.hub import check_name
from .machine import environment

PACKAGES = ("transformers", "safetensors", "gguf", "triton", "numpy", saver.PACKAGE)


@dataclass(frozen=True)
class Check:
    """One property of one room on one device, and what came of it. error is None where it holds."""

    room: str
    claim: str
    device: str
    dtype: str
    seconds: float
    error: str | None

    @property
    def ok(self) -> bool:
        return self.error is None


def describe() -> dict[str, str]:
    """The environment, a line each, for people."""
    found = environment()
    rows = {"vexact": found["vexact"], "commit": found["commit"] or "unknown: not a git checkout"}
    rows |= {"python": found["python"], "torch": found["torch"]}
    for package in PACKAGES:
        try:
            rows[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            rows[package] = "not installed"
    if vx.patch.untested(rows["transformers"]):
        rows["transformers"] += f": {vx.patch.untested(rows['transformers'])}"
    rows["platform"], rows["processor"] = found["platform"], found["processor"]
    rows["cores"] = f"{os.cpu_count()} ({torch.get_num_threads()} threads in use)"
    try:
        isas = vx.testing.cpu_isas()
        rows["instruction sets"] = f"{isas[-1]} (built and run here: {', '.join(isas)})"
    except vx.BackendUnavailable as error:
        rows["instruction sets"] = str(error)
    rows["cuda of torch"] = torch.version.cuda or "none: a CPU build of torch"
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        rows[f"gpu {index}"] = (
            f"{properties.name}, sm_{properties.major}{properties.minor}, {properties.total_memory / 2**30:.0f} GiB"
        )
    if torch.cuda.is_available():
        why = saver.unusable(torch.device("cuda", torch.cuda.current_device()))
        rows["sleep"] = f"storages: {why}" if why else "memory_saver"
    else:
        rows["gpu"] = "none visible"
    return rows


def needs(model: str | None, shapes: Sequence[tuple[int, int]]) -> Needs:
    """What is to be verified: for a model, from its configuration alone, and for weights of N output and K input
    features."""
    found = Needs()
    if model:
        check_name(model)
        found = needs_of(read_config(model, dtype=torch.bfloat16))
    return replace(found, matrices=(*found.matrices, *(Matrix(n, k) for n, k in shapes)))


def devices() -> list[str]:
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def self_check(device: str = "cpu") -> Iterator[Check]:
    """Run every check on a device, one after the other. A check that cannot run has failed, and says why; where none
    can, one says so for all."""
    state = vx.backends()["cpu"]
    if device == "cpu" and vx.current_backend() is None and state != "available":
        yield Check("every room", "runs at all", device, "any", 0.0, state)
        return
    dtypes = (torch.float32, torch.bfloat16) if device == "cpu" else (torch.bfloat16,)
    for dtype in dtypes:
        for room, claim, run in CHECKS:
            begin, error = time.perf_counter(), None
            try:
                run(device, dtype)
            except Exception as failure:  # one room's failure, of whatever kind, must not hide another's
                error = f"{type(failure).__name__}: {' '.join(str(failure).split())}"
            name = str(dtype).removeprefix("torch.")
            yield Check(room, claim, device, name, time.perf_counter() - begin, error)


def _rows_and_runs(function: Callable, *rowwise) -> None:
    check_rows(function, *rowwise)
    check_repeatable(lambda: function(*rowwise))


def _linear(device, dtype):
    x, w = cancelling(19, 578, 70, seed=0, dtype=dtype, device=device)
    bias = tricky(70, seed=1, dtype=dtype, device=device)
    _rows_and_runs(lambda x: vx.linear(x, w, bias), x)


def _rmsnorm(device, dtype):
    x, residual = (tricky(13, 577, seed=s, dtype=dtype, device=device) for s in (0, 1))
    weight = tricky(577, seed=2, dtype=dtype, device=device)
    _rows_and_runs(lambda x, r: vx.rmsnorm(x, weight, residual=r), x, residual)


def _layer_norm(device, dtype):
    x, residual = (tricky(13, 577, seed=s, dtype=dtype, device=device) for s in (0, 1))
    weight, bias = (tricky(577, seed=s, dtype=dtype, device=device) for s in (2, 3))
    _rows_and_runs(lambda x, r: vx.layer_norm(x, weight, bias, residual=r), x, residual)


def _rope(device, dtype):
    q, k = (tricky(11, heads, 64, seed=heads, dtype=dtype, device=device) for heads in (3, 1))
    positions = torch.arange(11, device=device) * 37
    frequencies = 1.0 / 10000 ** (torch.arange(32, dtype=torch.float32, device=device) / 32)

    def rotated(q, k, positions):
        cos, sin = vx.rope_cos_sin(positions, frequencies, dtype=dtype)
        return vx.rope(q, k, cos, sin)

    _rows_and_runs(rotated, q, k, positions)


def _silu_mul(device, dtype):
    _rows_and_runs(vx.silu_mul, tricky(11, 2 * 77, seed=0, dtype=dtype, device=device))


def _linear_silu_mul(device, dtype):
    x, w = cancelling(19, 576, 2 * 96, seed=0, dtype=dtype, device=device)
    w[:96] = tricky(96, 576, seed=1, dtype=dtype, device=device)
    _rows_and_runs(lambda x: vx.linear_silu_mul(x, w), x)
    assert_bitwise(vx.linear_silu_mul(x, w), vx.silu_mul(vx.linear(x, w)), "as one op and as two")


def _grouped_linear(device, dtype):
    x, w = cancelling(19, 130, 3 * 50, seed=0, dtype=dtype, device=device)
    check_grouped(vx.grouped_linear, vx.linear, x, w.view(3, 50, 130))


def _moe_route(device, dtype):
    _rows_and_runs(lambda x: vx.moe_route(x, 6), tricky(11, 60, seed=0, dtype=dtype, device=device))


def _fused_moe(device, dtype):
    x, w = cancelling(11, 66, 5 * 2 * 24, seed=0, dtype=dtype, device=device)
    down = tricky(5, 66, 24, seed=1, dtype=dtype, device=device)
    weights, ids = vx.moe_route(tricky(11, 5, seed=2, device=device), 3)
    _rows_and_runs(lambda x, t, i: vx.fused_moe(x, w.view(5, 48, 66), down, t, i), x, weights, ids)


def _log_softmax(device, dtype):
    _rows_and_runs(vx.log_softmax, tricky(7, 5003, seed=0, dtype=dtype, device=device))


def _mean(device, dtype):
    _rows_and_runs(lambda x: vx.mean(x, -1), tricky(11, 1025, seed=0, dtype=dtype, device=device))


def _head(device, dtype):
    hidden, weight = cancelling(11, 130, 1500, seed=0, dtype=dtype, device=device)
    target = torch.arange(11, device=device) * 131
    _rows_and_runs(lambda h, t: vx.linear_logprobs(h, weight, t, temperature=0.7, return_entropy=True), hidden, target)


def _sampler(device, dtype):
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(11, 64, dtype=torch.float32, generator=g).to(dtype).to(device)
    weight = torch.randn(1500, 64, dtype=torch.float32, generator=g).to(dtype).to(device)
    logits = vx.linear_logits(hidden, weight)
    seeds, positions = torch.arange(11, device=device) * 7919, torch.arange(11, device=device)
    draw = lambda *rowwise: vx.sample(*rowwise, temperature=0.7, top_k=50, top_p=0.9)  # noqa: E731
    check_rows(draw, logits, seeds, positions, neighbours=(float("inf"),))
    check_repeatable(lambda: draw(logits, seeds, positions))
    ids, logprobs, raw = draw(logits, seeds, positions)
    assert_bitwise(logprobs, vx.linear_logprobs(hidden, weight, ids, temperature=0.7), "sampled and trained")
    assert_bitwise(raw, vx.linear_logprobs(hidden, weight, ids), "sampled and trained, raw")


def _linear_sample(device, dtype):
    hidden, weight = cancelling(11, 130, 1500, seed=0, dtype=dtype, device=device)
    seeds, positions = torch.arange(11, device=device) * 7919, torch.arange(11, device=device)
    draw = lambda *rowwise: vx.linear_sample(rowwise[0], weight, *rowwise[1:], temperature=0.7)  # noqa: E731
    _rows_and_runs(draw, hidden, seeds, positions)
    drawn = vx.sample(vx.linear_logits(hidden, weight), seeds, positions, temperature=0.7)
    assert_bitwise(draw(hidden, seeds, positions), drawn, "drawn from hidden states and from logits")


def _attention(device, dtype):
    lengths, page, pages = [37, 5, 70], 8, 20
    total, heads, kv_heads, dim = sum(lengths), 6, 2, 64
    q = tricky(total, heads, dim, seed=0, dtype=dtype, device=device)
    k, v = (tricky(total, kv_heads, dim, seed=s, dtype=dtype, device=device) for s in (1, 2))
    ends = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0).tolist()

    def cu(sizes):
        return torch.tensor([0, *sizes], dtype=torch.int64, device=device).cumsum(0).to(torch.int32)

    trained = vx.attention_varlen(q, k, v, cu(lengths), max(lengths))
    check_repeatable(lambda: vx.attention_varlen(q, k, v, cu(lengths), max(lengths)))
    for i, (a, b) in enumerate(itertools.pairwise(ends)):
        alone = vx.attention_varlen(q[a:b], k[a:b], v[a:b], cu([b - a]), b - a)
        assert_bitwise(alone, trained[a:b], f"sequence {i} alone and packed")

    order = torch.randperm(pages, generator=torch.Generator().manual_seed(3)).tolist()
    table, slots = torch.zeros(len(lengths), 9, dtype=torch.int32), []
    for i, length in enumerate(lengths):
        mine = [order.pop() for _ in range(-(-length // page))]
        table[i, : len(mine)] = torch.tensor(mine, dtype=torch.int64)
        slots += [mine[t // page] * page + t % page for t in range(length)]
    k_cache, v_cache = (
        torch.full((pages, page, kv_heads, dim), float("nan"), dtype=dtype, device=device) for _ in "kv"
    )
    vx.kv_cache_store(k, v, k_cache, v_cache, torch.tensor(slots, dtype=torch.int64, device=device))
    table, contexts = table.to(device), torch.tensor(lengths, dtype=torch.int32, device=device)
    for name, sizes in (("prefill", lengths), ("a chunk", [20, 5, 33]), ("decode", [1, 1, 1])):
        rows = torch.cat([torch.arange(end - size, end) for end, size in zip(ends[1:], sizes)]).to(device)
        paged = vx.attention_paged(q[rows], k_cache, v_cache, table, contexts, cu(sizes), max(sizes))
        assert_bitwise(paged, trained[rows], f"{name} and training")


def _causal_conv(device, dtype):
    x, weight = tricky(60, 70, seed=0, dtype=dtype, device=device), tricky(70, 4, seed=1, dtype=dtype, device=device)
    trained = vx.causal_conv(x, weight)
    check_repeatable(lambda: vx.causal_conv(x, weight))
    taps, begin = torch.full((2, 4, 70), float("nan"), dtype=dtype, device=device), 0
    for count in (5, 1, 1, 40, 1, 12):
        step = (torch.tensor(v, dtype=torch.int32, device=device) for v in ([1], [begin + count], [0, count]))
        rows = slice(begin, begin + count)
        assert_bitwise(vx.causal_conv_paged(x[rows], weight, None, taps, *step), trained[rows], f"{count} rows")
        begin += count


def _gated_delta(device, dtype):
    tokens, heads, dim = 150, 4, 32
    q, k = (tricky(tokens, 2, dim, seed=s, dtype=dtype, device=device) for s in (0, 1))
    v = tricky(tokens, heads, dim, seed=2, dtype=dtype, device=device)
    a, b = (tricky(tokens, heads, seed=s, dtype=dtype, device=device) for s in (3, 4))
    parameters = (torch.full((heads,), v, dtype=torch.float32, device=device) for v in (0.0, -2.0))
    rows = q, k, v, *vx.delta_gates(a, b, *parameters)
    whole = torch.tensor([0, tokens], dtype=torch.int32, device=device)
    trained = vx.gated_delta_varlen(*rows, whole)
    check_repeatable(lambda: vx.gated_delta_varlen(*rows, whole))
    shapes = ((heads, dim, dim), (64, 2, dim), (64, heads, dim), (64, heads))
    memory = [torch.full((2, *shape), float("nan"), dtype=torch.float32, device=device) for shape in shapes]
    memory[1], begin = memory[1].to(dtype), 0
    for count in (62, 1, 1, 1, 70, 15):
        step = (torch.tensor(v, dtype=torch.int32, device=device) for v in ([1], [begin + count], [0, count]))
        part = tuple(x[begin : begin + count] for x in rows)
        out = vx.gated_delta_paged(*part, *memory, *step, count)
        assert_bitwise(out, trained[begin : begin + count], f"{count} rows from row {begin} on")
        begin += count


def _ranks(device, dtype):
    """Rows of weights, heads and blocks of the vocabulary that two ranks would have, side by side."""

    def halves(function: Callable, *weights: torch.Tensor) -> torch.Tensor:
        return torch.cat([function(*part) for part in zip(*(w.chunk(2, w.dim() - 2) for w in weights))], -1)

    x, w = cancelling(19, 130, 80, seed=0, dtype=dtype, device=device)
    assert_bitwise(halves(lambda w: vx.linear(x, w), w), vx.linear(x, w), "rows of a weight")
    logits = halves(lambda w: vx.linear_logits(x, w), w)
    assert_bitwise(logits, vx.linear_logits(x, w), "blocks of the vocabulary")
    gates, ups = cancelling(19, 130, 2 * 5 * 24, seed=1, dtype=dtype, device=device)[1].view(2, 5, 24, 130)
    down = tricky(5, 130, 24, seed=2, dtype=dtype, device=device)
    route = vx.moe_route(tricky(19, 5, seed=3, device=device), 3)
    taken: list[torch.Tensor] = []  # what each rank computes between its two products
    for gate_up in zip(gates.chunk(2, 1), ups.chunk(2, 1)):
        vx.fused_moe(x, torch.cat(gate_up, 1), down[..., :12], *route, between=lambda a: taken.append(a) or a)
    joined = torch.cat(taken, 1)
    both = torch.cat((gates, ups), 1)
    parts = [vx.fused_moe(x, both, part, *route, between=lambda a: joined) for part in down.chunk(2, 1)]
    assert_bitwise(torch.cat(parts, 1), vx.fused_moe(x, both, down, *route), "rows of experts")
    q = tricky(70, 6, 64, seed=0, dtype=dtype, device=device)
    k, v = (tricky(70, 2, 64, seed=s, dtype=dtype, device=device) for s in (1, 2))
    cu = torch.tensor([0, 70], dtype=torch.int32, device=device)
    heads = [vx.attention_varlen(*part, cu, 70) for part in zip(*(t.chunk(2, 1) for t in (q, k, v)))]
    assert_bitwise(torch.cat(heads, 1), vx.attention_varlen(q, k, v, cu, 70), "heads")


CHECKS: tuple[tuple[str, str, Callable], ...] = (
    ("linear", "a row alone, threads, instruction sets", _linear),
    ("rmsnorm", "a row alone, threads, instruction sets", _rmsnorm),
    ("layer_norm", "a row alone, threads, instruction sets", _layer_norm),
    ("rope", "a row alone, threads, instruction sets", _rope),
    ("silu_mul", "a row alone, threads, instruction sets", _silu_mul),
    ("linear_silu_mul", "a row alone; one op == linear and silu_mul", _linear_silu_mul),
    ("grouped_linear", "rows have linear's bits, however they are spread", _grouped_linear),
    ("moe_route", "a row alone, threads, instruction sets", _moe_route),
    ("fused_moe", "a row alone, threads, instruction sets", _fused_moe),
    ("log_softmax", "a row alone, threads, instruction sets", _log_softmax),
    ("mean", "a row alone, threads, instruction sets", _mean),
    ("linear_cross_entropy", "a row alone, threads, instruction sets", _head),
    ("sampler", "a row alone; sampled == trained log-probabilities", _sampler),
    ("linear_sample", "a row alone; hidden states == logits", _linear_sample),
    ("causal_conv", "decode == chunk == training", _causal_conv),
    ("gated_delta", "decode == chunk == training", _gated_delta),
    ("attention + kv_cache", "decode == chunk == prefill == training", _attention),
    ("ranks", "rows of weights, experts and heads on two == on one", _ranks),
)
