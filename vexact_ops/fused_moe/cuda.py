"""The CUDA kernels (csrc/fused_moe/cuda.cu) of plan, combination and gate; the products are those of grouped_linear.

Admitted byte for byte against the Triton kernels (contract: verify, then trust), once for each dtype and width, the
plan for each number of experts; what is not admitted takes the Triton kernels: same bits. Nothing waits for the plan's
values.
"""

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from .._core import choices, digest, gpu, native
from .._core.admit import Candidate, Decision, Proposal, canonical_by_rule, decided, race_on_gpu
from .._core.peers import Landing
from .._core.proof.bitwise import same_bits
from .._core.proof.inputs import cancelling, special_rows, tricky
from ..grouped_linear import cuda as grouped
from ..grouped_linear.cuda import (
    gather_rows,
    grouped_gate_up,
    grouped_gate_up_send,
    grouped_linear_dweight,
    grouped_linear_dx,
    grouped_linear_fwd,
)
from . import triton
from .triton import combine_biased as combine_biased
from .triton import swiglu_bwd as swiglu_bwd
from .triton import swiglu_fwd as swiglu_fwd

EXPERTS = 512  # the most that the plan's kernel counts
SMALL_M = 64  # rows for each expert: up to here the fastest products read rows through the order by themselves


@functools.lru_cache(4096)
def _scratch(slots: int) -> int:
    return native.ops().moe_plan_scratch(slots)


def plan(ids: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    if route("plan", ids.device, experts).chosen.name == TRITON:
        return triton.plan(ids, experts)
    return _plan_kernel(ids, experts)


def _plan_kernel(ids: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    slots = ids.numel()
    offsets, order, position = (ids.new_empty(size) for size in (experts + 1, slots, slots))
    chunks = _scratch(slots)
    native.ops().moe_plan(ids, offsets, order, position, ids.new_empty(chunks * experts) if chunks else None)
    return offsets, order, position


def _combine_kernel(y: Tensor, position: Tensor, weights: Tensor | None, tokens: int) -> Tensor:
    out = y.new_empty(tokens, y.shape[1])
    native.ops().moe_combine(y, position, weights, out)
    return out


def _scatter(x: Tensor, offsets: Tensor, order: Tensor, position: Tensor) -> Tensor:
    """x[order // top_k], every row of x read once; behind the last expert's rows: anything."""
    rows = x.new_empty(position.shape[0], x.shape[1])
    native.ops().moe_scatter(x, position, rows)
    return rows


def _gather(x: Tensor, offsets: Tensor, order: Tensor, position: Tensor) -> Tensor:
    return gather_rows(x, offsets, order, position.shape[0] // x.shape[0])


def _gate_bwd_kernel(
    h: Tensor, da: Tensor, order: Tensor, weights: Tensor, offsets: Tensor, gelu: bool
) -> tuple[Tensor, Tensor]:
    """dh and dweights; da becomes weight * a."""
    dh, dweights = torch.empty_like(h), torch.zeros_like(weights)
    native.ops().moe_gate_bwd(h, da, order, weights, offsets, gelu, dh, da, dweights)
    return dh, dweights


def _combine(y: Tensor, position: Tensor, weights: Tensor | None, tokens: int) -> Tensor:
    top_k = position.shape[0] // tokens if tokens else 1
    return route("combine", y.device, y.dtype, y.shape[1], top_k).chosen.run(y, position, weights, tokens)


def _gate_bwd(
    h: Tensor, da: Tensor, order: Tensor, weights: Tensor, offsets: Tensor, gelu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """dh, weight * a, dweights; da is no more."""
    if route("gate", h.device, h.dtype, da.shape[1], gelu).chosen.name == TRITON:
        return triton._gate_bwd(h, da, order, weights, offsets, gelu)
    dh, dweights = _gate_bwd_kernel(h, da, order, weights, offsets, gelu)
    return dh, da, dweights


# ---- admission

TRITON = "triton"  # the canonical kernels' name among verdicts
_BIASED = canonical_by_rule(TRITON, "with biases there is one kernel")


def route(part: str, device: torch.device, *of) -> Decision:
    """Which kernel computes a part of a call ("plan", "rows", "combine", "gate"): dispatch takes it, `explain` shows
    it, `admit` asks for it ahead of time. The products' are grouped_linear's to choose."""
    if part == "plan" and of[0] > EXPERTS:
        return canonical_by_rule(TRITON, f"the plan's kernel counts at most {EXPERTS} experts")
    return {"plan": _planning, "rows": _rows, "combine": _combining, "gate": _gating}[part](device, *of)


def _ours(name: str, run) -> Candidate:
    rooms = {room: digest.of_extension(room, "cuda") for room in ("fused_moe", "grouped_linear")}  # its copy of rows
    return Candidate(name, run, digest.of_files(__file__, **rooms))


def _key(kernel: str, dtype: torch.dtype, n: int, option: str) -> str:
    return f"fused_moe {kernel} {str(dtype).removeprefix('torch.')} N={n} {option}".rstrip()


@decided
def _planning(device: torch.device, experts: int) -> Proposal:
    canonical = Candidate(TRITON, triton.plan, digest.canonical("fused_moe"))
    cases = functools.partial(_plan_cases, device, experts)
    return Proposal(f"fused_moe plan E={experts}", [_ours("cuda", _plan_kernel)], canonical, cases)


@decided
def _rows(device: torch.device, dtype: torch.dtype, n: int, top_k: int) -> Proposal:
    """A copy has one order: what is asked here is which of two is faster."""
    canonical = Candidate("index", _gathered, digest.of_files(__file__))
    copies = [_ours("scatter", _scatter), _ours("gather", _gather)]
    cases = functools.partial(_rows_cases, dtype, device, n, top_k)
    return Proposal(_key("rows", dtype, n, f"top_k={top_k}"), copies, canonical, cases, _race)


@decided
def _combining(device: torch.device, dtype: torch.dtype, n: int, top_k: int) -> Proposal:
    canonical = Candidate(TRITON, triton._combine, digest.canonical("fused_moe"))
    cases = functools.partial(_combine_cases, dtype, device, n, top_k)
    key = _key("combine", dtype, n, f"top_k={top_k}")
    return Proposal(key, [_ours("cuda", _combine_kernel)], canonical, cases)


@decided
def _gating(device: torch.device, dtype: torch.dtype, n: int, gelu: bool) -> Proposal:
    canonical = Candidate(TRITON, _canonical_gate_bwd_live, digest.canonical("fused_moe") + digest.of_files(__file__))
    cases = functools.partial(_gate_bwd_cases, dtype, device, n, gelu)
    return Proposal(_key("gate_bwd", dtype, n, "gelu" * gelu), [_ours("cuda", _gate_bwd_live)], canonical, cases)


def _race(candidates: list[Candidate], case: tuple) -> list[float | Exception]:
    return race_on_gpu([[functools.partial(one.run, *case)] * 3 for one in candidates])


def _routed(ids: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """The plan, by PyTorch's own operations: what is to be combined must not come from a kernel under test."""
    expert = torch.where((ids >= 0) & (ids < experts), ids, experts).flatten().long()
    order = expert.argsort(stable=True)
    offsets = torch.bincount(expert, minlength=experts + 1)[:experts].cumsum(0)
    live = int(offsets[-1])
    position = torch.full_like(order, -1)
    position[order[:live]] = torch.arange(live, device=ids.device)
    order[live:] = 0
    return torch.cat([offsets.new_zeros(1), offsets]).int(), order.int(), position.int()


def _some_ids(tokens: int, top_k: int, experts: int, device: torch.device) -> Tensor:
    """With empty slots."""
    g = torch.Generator().manual_seed(tokens)
    return torch.randint(-1, experts + 1, (tokens, top_k), generator=g, dtype=torch.int32).to(device)


def _plan_cases(device: torch.device, experts: int) -> list[tuple]:
    """Slots that one block counts, and more of them; all to one expert, and to none."""
    cases = [(_some_ids(tokens, top_k, experts, device), experts) for tokens, top_k in ((1, 1), (77, 3), (5003, 8))]
    hot = torch.full((1030, 7), experts - 1, dtype=torch.int32, device=device)
    outside = torch.tensor([[-1, experts, -(2**31), 2**31 - 1]], dtype=torch.int32, device=device)
    return [*cases, (hot, experts), (outside, experts), (hot[:0], experts)]


def _gathered(x: Tensor, offsets: Tensor, order: Tensor, position: Tensor) -> Tensor:
    return x[order.long() // (position.shape[0] // x.shape[0])]


def _rows_cases(dtype, device, n, top_k) -> list[tuple]:
    cases = []
    for tokens in (1, 77, 4096):
        g = torch.Generator().manual_seed(tokens)
        ids = torch.randint(128, (tokens, top_k), generator=g, dtype=torch.int32).to(device)
        x = tricky(tokens, n, seed=n, dtype=dtype, device=device)
        cases.append((special_rows(x) if tokens == 77 else x, *_routed(ids, 128)))
    return cases


def _combine_cases(dtype, device, n, top_k) -> list[tuple]:
    """Rows that cancel within a token: v and -v, times nearly the same weight; and special ones, of both."""
    cases = []
    for tokens in (1, 77):
        _, order, position = _routed(_some_ids(tokens, top_k, 8, device), 8)
        v = tricky(tokens, n, seed=n, dtype=dtype, device=device).repeat_interleave(top_k, 0)
        sign = 1 - 2 * (torch.arange(tokens * top_k, device=device) % 2)
        y = (v * sign[:, None].to(dtype))[order.long()]
        weights = 1 + 1e-3 * tricky(tokens, top_k, seed=n + 1, device=device).clamp(-4, 4)
        cases += [(y, position, weights, tokens), (y, position, None, tokens)]
        special = special_rows(y, seed=tokens)
        cases += [(special, position, None, tokens), (special, position, weights, tokens)]
        cases += [(y, position, special_rows(weights, first=17 - 17 * (tokens > 1)), tokens)]
    # a row alone beside empty slots, of each kind
    ids = torch.full((50, top_k), -1, dtype=torch.int32, device=device)
    ids[:, -1] = 0
    _, _, position = _routed(ids, 8)
    y = special_rows(tricky(50 * top_k, n, seed=n + 2, dtype=dtype, device=device))
    ones = torch.ones(50, top_k, dtype=torch.float32, device=device)
    return [*cases, (y, position, ones, 50), (y, position, None, 50)]


def _gate_bwd_cases(dtype, device, n, gelu) -> list[tuple]:
    """Gates and gradients whose sum over the width cancels; magnitudes of all sizes; special rows of each operand."""
    cases = []
    for tokens in (1, 77):
        offsets, order, _ = _routed(_some_ids(tokens, 4, 8, device), 8)
        up, da = cancelling(4 * tokens, n, 1, n, dtype, device)
        up, da = up.clamp(-64, 64), da.expand(4 * tokens, n).contiguous()
        gate = 4 * tricky(4 * tokens, 1, seed=n, dtype=dtype, device=device).clamp(-4, 4).expand(-1, n)
        weights = tricky(tokens, 4, seed=n + 1, device=device)
        cases.append((torch.cat([gate, up], 1), da, order, weights, offsets, bool(gelu)))
    h, da, order, weights, offsets, gelu = cases[-1]
    tail = order, weights, offsets, gelu
    h2 = 4 * tricky(*h.shape, seed=n + 2, dtype=dtype, device=device).clamp(-64, 64)
    gate, up = h2.chunk(2, 1)
    special = [
        (torch.cat([special_rows(gate), up], 1), da, *tail),
        (torch.cat([gate, special_rows(up)], 1), da, *tail),
        (h2, special_rows(da), *tail),
        (h2, da, order, special_rows(weights), offsets, gelu),
    ]
    return [*cases, (h2, da, *tail), *special]


def _gate_bwd_live(h, da, order, weights, offsets, gelu) -> tuple[Tensor, ...]:
    da = da.clone()
    dh, dweights = _gate_bwd_kernel(h, da, order, weights, offsets, gelu)
    return _live(dh, da, dweights, offsets)


def _canonical_gate_bwd_live(h, da, order, weights, offsets, gelu) -> tuple[Tensor, ...]:
    return _live(*triton._gate_bwd(h, da, order, weights, offsets, gelu), offsets)


def _live(dh, scaled, dweights, offsets) -> tuple[Tensor, ...]:
    """What is defined of the results: the rows behind the last expert's are not."""
    live = torch.arange(len(dh), device=dh.device)[:, None] < offsets[-1]
    return torch.where(live, dh, 0), torch.where(live, scaled, 0), dweights


def admit(
    experts: int, hidden: int, inner: int, top_k: int, tokens: int, dtype: torch.dtype, device: torch.device, *,
    gelu: bool = False, training: bool = False, biased: bool = False,
) -> list[Decision]:  # fmt: skip
    """Verify ahead of time what so many tokens through such a mixture need. biased: gpt-oss's gate and biases."""
    device, slots = gpu.with_index(device), tokens * top_k
    found = [route("plan", device, experts)]
    apart = not _through_the_order(dtype, hidden, slots, experts)
    if apart:
        found.append(route("rows", device, dtype, hidden, top_k))
    if training or not biased:
        found.append(route("combine", device, dtype, hidden, top_k))
    through = 0 if apart else top_k
    up, down = (experts, 2 * inner, hidden), (experts, hidden, inner)
    kinds = [("fwd" if biased else f"gate_up{' gelu' * gelu}{' keep' * training}", up, through), ("fwd", down, 0)]
    if training:
        found += [] if biased else [route("gate", device, dtype, inner, gelu)]
        kinds += [("dx", down, through), ("dx", up, 0)]
        kinds += [(f"dweight{' dy' * (not apart)}", down, through), (f"dweight{' x' * (not apart)}", up, through)]
    return found + [
        grouped.admit(kind, *shape, slots, top_k=order, dtype=dtype, device=device) for kind, shape, order in kinds
    ]


def explain(
    op: str, *, x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, gelu: bool = False, keep: bool = False,
    ids: Tensor | None = None, dy: Tensor | None = None, h: Tensor | None = None, need_dx: bool = False,
    need_dgate_up: bool = False, need_ddown: bool = False, **_,
) -> list[tuple[str, Decision]]:  # fmt: skip
    """Which kernel computes each part of a call, of the operator's arguments by name."""
    backward, biased = op.endswith("_bwd"), "swiglu" in op
    slots, top_k = weights.numel(), weights.shape[1]
    order, offsets = (torch.empty(size, dtype=torch.int32, device=x.device) for size in (slots, gate_up.shape[0] + 1))
    if slots == 0:
        return []
    device, dtype, experts = x.device, x.dtype, gate_up.shape[0]
    inner = x.new_empty(slots, down.shape[2])  # of which nothing is read here but its shape

    def rows_of(t: Tensor) -> tuple:
        """t as the products read it, and the order they read it through."""
        if _reads_through(t, slots, experts):
            return t, order, top_k
        return t.new_empty(slots, t.shape[1]), None, 1

    def product(kind: str, t: Tensor, weight: Tensor, through: tuple = (None, 1)) -> Decision:
        return grouped.route(grouped.Product.of(kind, t, weight, offsets, *through))

    read, *through = rows_of(dy if backward else x)
    found = []
    if not backward:
        found.append(("plan", route("plan", device, experts)))
    if through[0] is None:
        found.append(("rows", route("rows", device, dtype, read.shape[1], top_k)))
    if not backward:
        kind = "fwd" if biased else f"gate_up{' gelu' * gelu}{' keep' * keep}"
        found.append(("gate_up", product(kind, read, gate_up, through)))
        found.append(("down", product("fwd", inner, down)))
        combine = _BIASED if biased else route("combine", device, dtype, x.shape[1], top_k)
        return [*found, ("combine", combine)]
    found.append(("dx of down", product("dx", read, down, through)))
    found.append(("gate", _BIASED if biased else route("gate", device, dtype, inner.shape[1], gelu)))
    if need_ddown:
        kind = "dweight" if through[0] is None else "dweight dy"
        found.append(("dweight of down", product(kind, read, inner, through)))
    if need_dx:
        found.append(("dx of gate_up", product("dx", h, gate_up)))
        found.append(("combine", route("combine", device, dtype, x.shape[1], top_k)))
    if need_dgate_up:
        read, *through = rows_of(x)
        kind = "dweight" if through[0] is None else "dweight x"
        found.append(("dweight of gate_up", product(kind, h, read, through)))
    return found


# ---- what ranks send to each other


# From so many slots on. Of 128 experts, 2048 to 768 on each of two H200s, gate_up to down takes 161 us so for 176 with
# a gather at 1024 slots, then at twice, four, 16 and 64 times as many 169 for 179, 190 for 192, 246 for 282, 677 for
# 832: also where kernels that only store are the faster ones.
SENDS = 1024
_SENT = ((1, "some"), (77, "some"), (77, "one"), (50, "none"), (1030, "some"), (1030, "half"))  # tokens, and whose


def sends(landing: Landing, x: Tensor, gate_up: Tensor, slots: int, gelu: bool) -> bool:
    """Whether what ranks compute of gate and up is sent while it is computed. By shapes, and by what all ranks have
    found together: one that went its own way would wait for the others for ever."""
    inner = gate_up.shape[1] // 2
    known = landing.takes(kind_of(gate_up, gelu), slots, inner, x.dtype)
    return slots >= SENDS and known and x.dtype == gate_up.dtype


def kind_of(gate_up: Tensor, gelu: bool) -> tuple:
    return "gate_up", *gate_up.shape, gate_up.dtype, gate_up.is_contiguous(), bool(gelu)


def admit_sends(landing: Landing, gate_up: Tensor, top_k: int, gelu: bool) -> str:
    """send.py's fused_moe_send. What may fail on one of the ranks comes first, for what follows is done by all."""
    try:
        failure = _sends_not(gate_up)
        cases = [] if failure else list(_sent_cases(landing, gate_up, top_k, gelu))
    except (RuntimeError, ValueError) as error:
        failure = f"{type(error).__name__}: {error}"
    if failure := landing.agree(failure):
        return failure
    differ = 0
    for rows, offsets, expected in cases:
        whole = landing(expected)
        for ring in grouped.OWN:
            found = landing.view(*expected.shape, expected.dtype)
            found.view(torch.uint8).fill_(0xFF)
            landing.meet()  # all have compared the one before, and no column comes before this
            differ += not same_bits(grouped.send_by(ring, rows, gate_up, offsets, gelu, landing), whole)
    return landing.admit(kind_of(gate_up, gelu), "other bytes came than a gather brings" if differ else "")


def _sends_not(gate_up: Tensor) -> str:
    experts, width, hidden = gate_up.shape
    reason = gpu.not_sm90(gate_up.device) or ""
    if choices.is_off("VEXACT_ADMIT"):
        reason = "VEXACT_ADMIT=0: nothing is verified"
    elif gate_up.dtype != torch.bfloat16:
        reason = f"it takes bfloat16, not {str(gate_up.dtype)[6:]}"
    elif width % 16 or hidden % 8 or experts > EXPERTS:
        reason = f"it takes multiples of 8 columns on a rank and at most {EXPERTS} experts, not {tuple(gate_up.shape)}"
    elif not gate_up.is_contiguous():
        reason = "it takes matrices side by side"
    return reason


def _sent_cases(landing: Landing, gate_up: Tensor, top_k: int, gelu: bool) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Rows side by side, offsets, and this rank's columns as the canonical kernel has them: rows that all ranks have,
    of no expert, of one, of every other one, and some that are nobody's."""
    (experts, width, hidden), device = gate_up.shape, gate_up.device
    most = len(landing.memory) // (width // 2 * landing.peers.size * 2) // top_k
    for tokens, whose in _SENT:
        if (tokens := min(tokens, most)) == 0:
            continue
        ids = _some_ids(tokens, top_k, experts, device)
        if whose == "one":
            ids.fill_(experts - 1)
        elif whose == "none":
            ids.fill_(-1)
        elif whose == "half":
            ids = ids // 2 * 2
        offsets, order, _ = _routed(ids, experts)
        x = special_rows(tricky(tokens, hidden, seed=hidden, dtype=gate_up.dtype, device=device))
        rows = x[order.long() // top_k]
        _, expected = grouped.CANONICAL["gate_up"](rows, gate_up, offsets, None, 1, gelu, False)
        yield rows, offsets, expected


# ---- the layer


def _side_by_side(x: Tensor, offsets: Tensor, order: Tensor, position: Tensor) -> Tensor | None:
    """The rows of x side by side in the plan's order (behind the last expert's: anything), where the products' fastest
    kernels want them so: None where they read few rows through the order, and for what the Triton kernels serve."""
    slots = position.shape[0]
    if _reads_through(x, slots, offsets.shape[0] - 1):
        return None
    decision = route("rows", x.device, x.dtype, x.shape[1], slots // x.shape[0])
    return decision.chosen.run(x, offsets, order, position)


def read(x: Tensor, offsets: Tensor, order: Tensor, position: Tensor) -> tuple[Tensor, Tensor | None, int]:
    """What a product takes to read the rows of x in the plan's order."""
    rows = _side_by_side(x, offsets, order, position) if len(x) else None
    return (x, order, order.shape[0] // x.shape[0] if len(x) else 1) if rows is None else (rows, None, 1)


def _reads_through(x: Tensor, slots: int, experts: int) -> bool:
    aligned = x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
    return not aligned or _through_the_order(x.dtype, x.shape[1], slots, experts)


def _through_the_order(dtype: torch.dtype, hidden: int, slots: int, experts: int) -> bool:
    return slots <= SMALL_M * experts or dtype != torch.bfloat16 or hidden % 8 != 0


def fused_moe_fwd(
    x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor, gelu: bool, keep: bool, between=None
):
    offsets, order, position = plan(ids, gate_up.shape[0])
    rows, *through = read(x, offsets, order, position)
    given = gate_up, offsets, *through, gelu
    if isinstance(between, Landing) and sends(between, x, gate_up, position.shape[0], gelu):
        h, a = None, grouped_gate_up_send(rows, *given, between)
    else:
        h, a = grouped_gate_up(rows, *given, keep)
        a = a if between is None else between(a)
    del rows
    y = grouped_linear_fwd(a, down, offsets)
    del a
    return _combine(y, position, weights, x.shape[0]), h, offsets, order, position


def fused_moe_bwd(
    dy: Tensor, x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, h: Tensor, offsets: Tensor, order: Tensor,
    position: Tensor, gelu: bool, need_dx: bool, need_dgate_up: bool, need_ddown: bool,
):  # fmt: skip
    ordered = order, weights.shape[1]
    rows = _side_by_side(dy, offsets, order, position)  # two products read them
    of_dy = (dy, ordered, "dy") if rows is None else (rows, (None, 1), "")
    del rows
    da = grouped_linear_dx(of_dy[0], down, offsets, *of_dy[1])
    dh, scaled, dweights = _gate_bwd(h, da, order, weights, offsets, gelu)
    del da
    ddown = None
    if need_ddown:
        ddown = grouped_linear_dweight(of_dy[0], scaled, offsets, *of_dy[1], gathered=of_dy[2])
    del scaled, of_dy
    dx = _combine(grouped_linear_dx(dh, gate_up, offsets), position, None, x.shape[0]) if need_dx else None
    dgate_up = None
    if need_dgate_up:
        rows = _side_by_side(x, offsets, order, position)
        of_x = (x, ordered, "x") if rows is None else (rows, (None, 1), "")
        dgate_up = grouped_linear_dweight(dh, of_x[0], offsets, *of_x[1], gathered=of_x[2])
    return dx, dgate_up, ddown, dweights
