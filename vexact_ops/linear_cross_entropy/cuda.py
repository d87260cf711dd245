"""The GPU's own class on SM90, in bf16: one pass over the logits makes sums and, where wanted, what gradients need.

Admitted byte for byte against the Triton kernels (contract: verify, then trust). Everything else (fp32, fp16, rows off
16-byte boundaries, other GPUs) takes the Triton kernels: same bits.

The loss is made with its gradients in three products. e^(z - its block's largest z) is kept of every logit, in bf16, in
chunks of the vocabulary; then it becomes the gradient, in place, and enters the two other products. 2 T V bytes are a
lot (2.3 GiB for 8,192 tokens of 151,936): most of it lies where the gradient of the weight will lie. A chunk's place
there is overwritten only after that chunk was read, see _layout. What finds no place is made again.

Of few tokens it is less than the gradient of the weight, which takes longer to write than all the rest takes: that
product then waits for the backward, where what the loss is multiplied with is known, and is written once.
"""

import functools

import torch
from torch import Tensor

from .._core import check, digest, gpu, native
from .._core.admit import Candidate, Decision, Proposal, canonical_by_rule, decided
from .._core.proof.inputs import SMALL, cancelling, special_rows
from . import triton
from .triton import LSE_BLOCK, compact, count, loss_of, reduce_tokens, scaled, softcap_bwd, softcap_fwd, spread

__all__ = [
    "admit",
    "compact",
    "count",
    "kept_shape",
    "linear_logprobs_bwd",
    "linear_logprobs_fwd",
    "loss_of",
    "loss_with_gradients",
    "scaled",
    "softcap_bwd",
    "softcap_fwd",
    "spread",
    "unit_dweight",
    "unit_gradients",
]

# They bound the memory beyond inputs and results; no bit depends on them.
FWD_TOKENS = 16384  # whose block sums are held at once: 8 or 12 bytes for every 128 logits
CHUNK = 2048  # columns of the vocabulary that lie together
KEPT_BYTES = 5 << 28  # 1.25 GiB of chunks, besides those that lie in the gradient of the weight


def linear_logprobs_fwd(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    temperature: Tensor,
    softcap: float,
    want_entropy: bool,
    live: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    run = _logprobs if _fast(hidden, weight) else triton.linear_logprobs_fwd
    return run(hidden, weight, target, temperature, softcap, want_entropy, live)


def linear_logprobs_bwd(
    dlogprob: Tensor,
    dentropy: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    temperature: Tensor,
    softcap: float,
    entropy: Tensor | None,
    lse: Tensor,
    need_dhidden: bool,
    need_dweight: bool,
    live: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    run = _logprobs_bwd if _fast(hidden, weight) else triton.linear_logprobs_bwd
    upstream, head = (dlogprob, dentropy), (hidden, weight, target, temperature, softcap)
    return run(*upstream, *head, entropy, lse, need_dhidden, need_dweight, live)


def loss_with_gradients(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    scale: Tensor | None,
    need_dhidden: bool,
    need_dweight: bool,
    live: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Log-probabilities, log-sum-exps, and the gradients that triton.unit_gradients makes of them; where there is a
    kept_shape, instead of dweight what unit_dweight makes it of."""
    run = _loss_with_gradients if _fast(hidden, weight) else _canonical_loss
    keep = need_dweight and kept_shape(hidden, weight) is not None
    made = run(hidden, weight, target, scale, need_dhidden, need_dweight, live, keep)
    if keep and weight.shape[0] % CHUNK:
        made[3][-1, :, weight.shape[0] % CHUNK :].zero_()  # an operator's output: all of it is known
    return made


def kept_shape(hidden: Tensor, weight: Tensor) -> tuple[int, int, int] | None:
    """Of the gradients of logits, where the loss keeps them for its backward rather than the gradient of the weight:
    chunks of the vocabulary, each (tokens, CHUNK)."""
    (tokens, width), chunks = hidden.shape, -(-weight.shape[0] // CHUNK)
    few = tokens <= width and 2 * chunks * tokens * CHUNK <= KEPT_BYTES
    return (chunks, tokens, CHUNK) if few else None


def unit_dweight(
    d: Tensor, hidden: Tensor, weight: Tensor, scale: Tensor | None, factor: Tensor, live: Tensor
) -> Tensor:
    """triton.unit_gradients' dweight from gradients of logits in a kept_shape, times factor () fp32, rounded again."""
    run = _unit_dweight if _fast(hidden, weight) else _canonical_dweight
    return run(d, hidden, weight, scale, factor, live)


def unit_gradients(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    lse: Tensor,
    scale: Tensor | None,
    need_dhidden: bool,
    need_dweight: bool,
    live: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """As triton.unit_gradients; what they need of the forward is made again with them."""
    if not _fast(hidden, weight):
        return triton.unit_gradients(hidden, weight, target, lse, scale, need_dhidden, need_dweight, live)
    return _loss_with_gradients(hidden, weight, target, scale, need_dhidden, need_dweight, live)[2:]


# ---- the kernels


def _logprobs(hidden, weight, target, temperature, softcap, want_entropy, live=None):
    tokens, vocabulary = hidden.shape[0], weight.shape[0]
    new = functools.partial(torch.empty, dtype=torch.float32, device=hidden.device)
    logprob, lse, entropy = new(tokens), new(tokens, 2), new(tokens) if want_entropy else None
    held = min(tokens, FWD_TOKENS)
    parts, target_logit = new(held, 3 if want_entropy else 2, -(-vocabulary // LSE_BLOCK)), new(held)
    for first in range(0, tokens, FWD_TOKENS):
        chunk = slice(first, first + FWD_TOKENS)
        head = hidden[chunk], weight, target[chunk], temperature if temperature.shape[0] == 1 else temperature[chunk]
        native.ops().head_blocks(*head, softcap, 0, vocabulary, live, first, parts, target_logit, None)
        results = logprob[chunk], None if entropy is None else entropy[chunk], lse[chunk]
        reduce_tokens(parts, target_logit, *head[2:], vocabulary, *results, live, first)
    return logprob, entropy, lse


def _room(hidden: Tensor, chunks: int) -> Tensor:
    return torch.empty(chunks, hidden.shape[0], CHUNK, dtype=hidden.dtype, device=hidden.device)


def _affordable(hidden: Tensor, weight: Tensor) -> int:
    """How many chunks fit into KEPT_BYTES: one at least, no more than there are."""
    return max(1, min(-(-weight.shape[0] // CHUNK), KEPT_BYTES // (2 * hidden.shape[0] * CHUNK)))


def _logprobs_bwd(
    dlogprob,
    dentropy,
    hidden,
    weight,
    target,
    temperature,
    softcap,
    entropy,
    lse,
    need_dhidden,
    need_dweight,
    live=None,
):
    vocabulary = weight.shape[0]
    products = _HeadGradients(hidden, weight, need_dhidden, need_dweight, None, hidden.dtype, live)
    room = _room(hidden, _affordable(hidden, weight))
    for low in range(0, vocabulary, room.shape[0] * CHUNK):
        count = min(room.shape[0] * CHUNK, vocabulary - low)
        head = hidden, weight, target, temperature, softcap, low, count
        native.ops().head_gradients(*head, live, lse, dlogprob, dentropy, None if dentropy is None else entropy, room)
        products.add_to_dhidden(room, low, count)
        products.add_to_dweight(room, low, count)
    return products.dhidden, products.dweight


class _HeadGradients:
    """The two products with gradients of logits, which come in chunks, the vocabulary ascending; at the end both are
    multiplied with `scale`, where there is one, and rounded, dhidden to `dtype`. Of dhidden the live rows alone."""

    def __init__(self, hidden, weight, need_dhidden, need_dweight, scale, dtype, live):
        self.hidden, self.weight, self.need_dhidden, self.scale, self.dtype = hidden, weight, need_dhidden, scale, dtype
        self.live = live
        self.dhidden = None
        new = functools.partial(torch.empty, weight.shape, dtype=weight.dtype, device=weight.device)
        self.dweight = new() if need_dweight else None

    def add_to_dhidden(self, d: Tensor, low: int, count: int) -> None:
        """`count` columns from `low` on lie in d."""
        if not self.need_dhidden:
            return
        last, before = low + count == self.weight.shape[0], self.dhidden
        dtype = self.dtype if last else torch.float32
        if before is None or before.dtype != dtype:
            self.dhidden = torch.empty(self.hidden.shape, dtype=dtype, device=self.hidden.device)
        # order: the vocabulary ascending, continued from chunk to chunk in fp32
        scale = self.scale if last else None
        native.ops().head_dhidden(d, self.weight[low : low + count], before, scale, self.live, self.dhidden)

    def add_to_dweight(self, d: Tensor, low: int, count: int) -> None:
        if self.dweight is not None:  # order: tokens ascending
            out = self.dweight[low : low + count]
            native.ops().head_dweight(d, self.hidden, self.scale, None, self.live, out)


def _layout(tokens: int, width: int, vocabulary: int, chunk: int, beside: int) -> tuple[int, int, int]:
    """How many chunks lie in the gradient of the weight, from its row `chunk` on; the elements from one to the next;
    and how many lie beside it, where `beside` are affordable. The first ones of the vocabulary lie inside.

    Chunks are read in ascending order: when chunk j has been, rows up to (j + 1) * chunk hold results. So chunk j lies
    at (j + 1) * chunk * width or later, and no two of them overlap.
    """
    chunks = -(-vocabulary // chunk)
    apart = chunk * max(tokens, width)
    fit = (vocabulary * width - chunk * width - chunk * tokens) // apart + 1
    inside = min(max(0, chunks - beside), max(0, fit))
    return inside, apart, min(beside, chunks - inside)


def _steps(first: int, end: int, width: int, chunk: int, apart: int) -> list[tuple[int, int]]:
    """Chunks [first, end) of _layout's inside in steps: the rows that a step writes lie before all that it reads."""
    steps = []
    while first < end:
        steps.append((first, min(end, 1 + first * apart // (chunk * width))))
        first = steps[-1][1]
    return steps


def _loss_with_gradients(hidden, weight, target, scale, need_dhidden, need_dweight, live=None, keep=False):
    (tokens, width), vocabulary, ops = hidden.shape, weight.shape[0], native.ops()
    new = functools.partial(torch.empty, dtype=torch.float32, device=hidden.device)
    parts, target_logit = new(tokens, 2, -(-vocabulary // LSE_BLOCK)), new(tokens)
    logprob, lse = new(tokens), new(tokens, 2)
    products = _HeadGradients(hidden, weight, need_dhidden, need_dweight and not keep, scale, torch.float32, live)
    inside, apart, beside = 0, 0, _affordable(hidden, weight)
    if products.dweight is not None:
        inside, apart, beside = _layout(tokens, width, vocabulary, CHUNK, beside)
    head = hidden, weight, target, torch.ones(1, dtype=torch.float32, device=hidden.device), 0.0

    def columns(first: int, end: int) -> tuple[int, int]:
        return first * CHUNK, min(end * CHUNK, vocabulary) - first * CHUNK

    room, kept = _room(hidden, beside), []  # kept: first chunk, the one after the last, where they lie
    if inside:
        place = products.dweight.as_strided((inside, tokens, CHUNK), (apart, CHUNK, 1), CHUNK * width)
        kept.append((0, inside, place))
    kept.append((inside, inside + beside, room))
    for first, end, where in kept:
        ops.head_blocks(*head, *columns(first, end), live, 0, parts, target_logit, where)
    done = min((inside + beside) * CHUNK, vocabulary)
    if done < vocabulary:
        ops.head_blocks(*head, done, vocabulary - done, live, 0, parts, target_logit, None)
    reduce_tokens(parts, target_logit, target, head[3], vocabulary, logprob, None, lse, live)
    for first, end, where in kept:
        ops.head_unit_gradients(where, parts, lse, logprob, target, live, *columns(first, end))
    if done == vocabulary:
        del parts
    for first, end, where in kept:  # all of them, before any is overwritten
        products.add_to_dhidden(where, *columns(first, end))
    for first, end in _steps(0, inside, width, CHUNK, apart):
        products.add_to_dweight(place[first:end], *columns(first, end))
    products.add_to_dweight(room, *columns(inside, inside + beside))
    for low in range(done, vocabulary, room.shape[0] * CHUNK):  # what found no place is made again
        count = min(room.shape[0] * CHUNK, vocabulary - low)
        ops.head_blocks(*head, low, count, live, 0, None, None, room)
        ops.head_unit_gradients(room, parts, lse, logprob, target, live, low, count)
        products.add_to_dhidden(room, low, count)
        products.add_to_dweight(room, low, count)
    return logprob, lse, products.dhidden, room if keep else products.dweight


def _unit_dweight(d, hidden, weight, scale, factor, live):
    dweight = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
    native.ops().head_dweight(d, hidden, scale, factor, live, dweight)  # order: tokens ascending
    return dweight


# ---- admission

KERNEL, TRITON = "wgmma 128x256x64 ring 4", "triton"


def route(hidden: Tensor, weight: Tensor) -> Decision:
    """Which kernels compute a call: dispatch takes it, `explain` shows it, `admit` asks for it ahead of time."""
    rule = _rule(hidden, weight)
    return canonical_by_rule(TRITON, rule) if rule else _heads(hidden.device, hidden.shape[1])


def _fast(hidden: Tensor, weight: Tensor) -> bool:
    """These kernels take the operands, and have the canonical kernels' bytes for this width on this machine."""
    return route(hidden, weight).chosen.name == KERNEL


def _rule(hidden: Tensor, weight: Tensor) -> str | None:
    """Why these kernels do not take the operands."""
    if hidden.dtype != torch.bfloat16:
        return "they take bf16"
    if hidden.shape[0] == 0 or hidden.shape[1] == 0:
        return "there is nothing to compute"
    if hidden.shape[1] % 8 or not (gpu.aligned_rows(hidden) and gpu.aligned_rows(weight)):
        return "rows do not begin on 16-byte boundaries"
    return gpu.not_sm90(hidden.device)


@decided
def _heads(device: torch.device, width: int) -> Proposal:
    ours = functools.partial(_everything, _logprobs, _logprobs_bwd, _loss_with_gradients, _unit_dweight, False)
    theirs = triton.linear_logprobs_fwd, triton.linear_logprobs_bwd, _canonical_loss, _canonical_dweight, True
    canonical = digest.canonical("linear_cross_entropy"), digest.of_files(__file__)
    candidate = digest.of_files(__file__, native=digest.of_extension("linear_cross_entropy", "cuda"))

    return Proposal(
        f"linear_cross_entropy bfloat16 H={width}",
        [Candidate(KERNEL, ours, candidate)],
        Candidate(TRITON, functools.partial(_everything, *theirs), " ".join(canonical)),
        functools.partial(_cases, device, width),
    )


def explain(op: str, *, hidden: Tensor | None = None, weight: Tensor | None = None, **_) -> list[tuple[str, Decision]]:
    """Which kernels compute a call, of the operator's arguments by name."""
    return [] if op.startswith("softcap") else [("head", route(check.rows(hidden), check.rows(weight)))]


def admit(width: int, device: torch.device) -> Decision:
    """Verify ahead of time."""
    row = torch.empty(1, width, dtype=torch.bfloat16, device=gpu.with_index(device))
    return route(row, row)


def _cases(device: torch.device, width: int) -> list[tuple]:
    """Rows that cancel beside rows with probabilities of all sizes; one token; a temperature and a cap; tokens that are
    ignored; and special rows: of hidden, of the weight, and of what comes from above."""

    def case(tokens: int, vocabulary: int, temperatures: int, softcap: float, ignored: int, special: str = "") -> tuple:
        g = torch.Generator(device).manual_seed(tokens)
        random = functools.partial(torch.rand, generator=g, dtype=torch.float32, device=device)
        hidden, weight = cancelling(tokens, width, vocabulary, seed=width + tokens, device=device)
        hidden = (hidden.float() / hidden.float().abs().amax(-1, keepdim=True)).bfloat16()
        hidden[::2] = random(hidden[::2].shape) * 2 - 1  # and some with probabilities of all sizes
        target = torch.randint(vocabulary, (tokens,), generator=g, device=device)
        up = random(tokens) - 0.5, random(tokens) - 0.5
        if special == "all":
            hidden = special_rows(hidden)
        elif special == "small":
            hidden, weight = special_rows(hidden, kinds=SMALL), special_rows(weight, first=3, kinds=SMALL)
        elif special == "above":
            up = tuple(special_rows(u[:, None], seed=i)[:, 0] for i, u in enumerate(up))
        return (
            hidden,
            weight,
            target,
            random(temperatures) + 0.5,
            softcap,
            up,
            tokens - ignored,
            special in ("", "small"),
        )

    return [
        case(300, 1300, 1, 0.0, 77),
        case(1, 700, 1, 0.0, 0),
        case(70, 520, 70, 5.0, 0),
        case(31, 520, 31, 5.0, 2, "all"),
        case(29, 520, 1, 0.0, 3, "small"),
        case(27, 520, 1, 0.0, 0, "above"),
        # Every other kernel that is chosen by the number of tokens, and special rows for each way to make logits.
        case(13, 520, 1, 0.0, 0),
        case(50, 520, 1, 0.0, 5),
        case(200, 520, 200, 5.0, 0),
        case(1030, 520, 1, 0.0, 30),
        case(90, 520, 90, 5.0, 2, "all"),
        case(91, 520, 1, 0.0, 3, "small"),
        case(131, 520, 131, 5.0, 2, "all"),
        case(133, 520, 1, 0.0, 3, "small"),
    ]


def _canonical_loss(
    hidden, weight, target, scale, need_dhidden, need_dweight, live=None, keep=False, uniform=False
):  # fmt: skip
    one = torch.ones(hidden.shape[0] if uniform else 1, dtype=torch.float32, device=hidden.device)
    logprob, _, lse = triton.linear_logprobs_fwd(hidden, weight, target, one, 0.0, uniform, live)
    head = hidden, weight, target, lse
    dhidden, dweight = triton.unit_gradients(*head, scale, need_dhidden, need_dweight and not keep, live)
    if keep:
        dweight = _room(hidden, -(-weight.shape[0] // CHUNK))
        triton.unit_dlogits(*head, live, dweight)
    return logprob, lse, dhidden, dweight


def _canonical_dweight(d, hidden, weight, scale, factor, live):
    return triton.scaled(triton.unit_dweight(d, hidden, weight, scale), factor, weight.dtype)


def _everything(
    forward, backward, loss, from_kept, uniform, hidden, weight, target, temperature, softcap, up, counting, finite
) -> list[Tensor]:  # fmt: skip
    """Results of all kernels.

    uniform  always with a temperature for each token and with the entropy, by numbers that change nothing (1 and 0), so
             that fewer kernels have to be compiled
    finite   or not: then 0 times what comes of the entropy would change something
    """
    tokens, results = hidden.shape[0], []
    one = torch.ones(1, dtype=torch.float32, device=hidden.device)
    for t, with_entropy in ((one, False), (temperature, True)):
        head = hidden, weight, target, t.expand(tokens).contiguous() if uniform else t, softcap
        logprob, entropy, lse = forward(*head, uniform or with_entropy)
        results += [logprob, lse, *([entropy] if with_entropy else [])]
        if finite or with_entropy:
            dentropy = up[1] if with_entropy else torch.zeros_like(up[1]) if uniform else None
            results += backward(up[0], dentropy, *head, entropy, lse, True, True)
    live, among = (
        torch.tensor(counting, dtype=torch.int64, device=hidden.device),
        torch.arange(tokens, device=hidden.device) < counting,
    )
    kept = torch.where(among[:, None], hidden, 0), weight, torch.where(among, target, -1)
    scale = torch.tensor(1 / 3, dtype=torch.float32, device=hidden.device)
    options = {"uniform": True} if uniform else {}
    logprob, lse, dhidden, dweight = loss(*kept, scale, True, True, live, **options)
    results += [logprob, lse, dhidden[:counting], dweight]
    if kept_shape(hidden, weight) is not None:
        d = loss(*kept, scale, False, True, live, keep=True, **options)[3]
        results += [
            from_kept(d, kept[0], weight, scale, factor, live) for factor in (up[0][0], one[0])
        ]  # 1 has a way of its own
    return results
