"""The pieces of a mixture of experts, tried like all others (see pieces.py): the router, and the stacked experts.

The block around the two stays the model's own Python: it moves data and adds, and the audit holds it to that. Shared
experts are gated feed-forward blocks like any other.
"""

import contextlib
import functools
import inspect
import itertools
import logging
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

import vexact_ops as vx

from .._core.operator import Operator
from ..fused_moe.reference import fused_moe_ref
from ..fused_moe.swiglu import ACTIVATION as SWIGLU
from ..fused_moe.swiglu import ALPHA, LIMIT
from ..moe_route.op import SCORES
from ..moe_route.reference import moe_route_ref
from ..silu_mul.op import ACTIVATIONS
from . import expert_parallel
from .pieces import NotCovered, activation_of, agree, class_of, random, run_stock, twin
from .routed import give, uncast
from .slots import slots_of, without_slots

CHOICE = "route_tokens_to_experts"
_LOG = logging.getLogger(__name__)
_BIAS = "e_score_correction_bias"
_TOKENS = 40  # of a trial: enough that another choice or scale shows


# experts


_WEIGHTS_3D, _BIASES = ("gate_up_proj", "down_proj"), ("gate_up_proj_bias", "down_proj_bias")


def is_experts(module: nn.Module) -> bool:
    held = module._parameters
    return set(held) in ({*_WEIGHTS_3D}, {*_WEIGHTS_3D, *_BIASES}) and all(
        held[name] is not None and held[name].dim() == (3 if name in _WEIGHTS_3D else 2) for name in held
    )


def biased(module: nn.Module) -> bool:
    """Whether experts are of gpt-oss's form: with biases, matrices the other way round, gates and ups by turns."""
    return _BIASES[0] in module._parameters


def experts_forward(module: nn.Module) -> tuple[Callable, str]:
    """The aligned forward of stacked experts, and their activation."""
    if biased(module):
        return _biased_forward(module)
    # Behind the decorator: it would hand the call to another implementation of the same.
    original = inspect.unwrap(type(module).forward)
    apart = bool(slots_of(original))  # VeOmni's: this rank may hold a part of them, now or later
    experts, inner, hidden = experts_of(module), 5, 6
    held = module.gate_up_proj.shape[0]
    if experts != held and not (apart and experts % held == 0):
        raise NotCovered(f"it holds {held} of {experts} experts")
    gate_up = random(experts, 2 * inner, hidden, seed=1)
    down = random(experts, hidden, inner, seed=2)
    x, weights = 2 * random(_TOKENS, hidden, seed=3), random(_TOKENS, min(2, experts), seed=4).abs()
    ids = random(_TOKENS, experts, seed=5).argsort(1)[:, : weights.shape[1]]
    tried = twin(module, parameters={"gate_up_proj": gate_up, "down_proj": down})
    got = run_stock(tried, x, ids, weights, forward=without_slots(original).__get__(tried))
    for activation in ACTIVATIONS:
        if agree(got, fused_moe_ref(x, gate_up, down, weights, ids, activation=activation), 1e-6):
            return _experts_forward(activation, apart), activation
    raise NotCovered(
        f"experts whose {activation_of(module)} or form no aligned op computes: expected {' or '.join(ACTIVATIONS)}"
    )


@functools.cache
def _experts_forward(activation: str, apart: bool) -> Callable:
    def experts_forward(self, hidden_states, top_k_index, top_k_weights):
        top_k_weights = uncast(self, top_k_index, top_k_weights)
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        weights, ids = top_k_weights.to(torch.float32), top_k_index.to(torch.int32)
        if apart:
            return expert_parallel.experts(self, x, weights, ids, activation)
        return vx.fused_moe(x, self.gate_up_proj, self.down_proj, weights, ids, activation=activation)

    return experts_forward


def _biased_forward(module: nn.Module) -> tuple[Callable, str]:
    original = inspect.unwrap(type(module).forward)
    experts, inner, hidden = experts_of(module), 5, 6
    if experts != module.gate_up_proj.shape[0]:
        raise NotCovered(f"it holds {module.gate_up_proj.shape[0]} of {experts} experts")
    gate_up, down = 4 * random(experts, 2 * inner, hidden, seed=1), random(experts, hidden, inner, seed=2)
    biases = {"gate_up_bias": 4 * random(experts, 2 * inner, seed=6), "down_bias": random(experts, hidden, seed=7)}
    x, weights = 2 * random(_TOKENS, hidden, seed=3), random(_TOKENS, min(2, experts), seed=4).abs()
    ids = random(_TOKENS, experts, seed=5).argsort(1)[:, : weights.shape[1]]
    stored = (gate_up.transpose(1, 2), down.transpose(1, 2), *biases.values())
    tried = twin(module, parameters=dict(zip((*_WEIGHTS_3D, *_BIASES), stored)))
    got = run_stock(tried, x, ids, weights, forward=without_slots(original).__get__(tried))
    if not agree(got, fused_moe_ref(x, gate_up, down, weights, ids, activation=SWIGLU, **biases), 1e-6):
        numbers = " and ".join(f"{n} {getattr(module, n)}" for n in ("alpha", "limit") if hasattr(module, n))
        raise NotCovered(
            "experts whose activation or form no aligned op computes"
            + (f": got {numbers}, expected alpha {ALPHA} and limit {LIMIT}" if numbers else "")
        )
    return biased_experts_forward, f"{SWIGLU}, biases"


def biased_experts_forward(self, hidden_states, router_indices=None, routing_weights=None):
    if self.gate_up_proj.shape[0] != experts_of(self):  # an id of another's would be an empty slot to fused_moe
        raise ValueError(
            f"experts: got {self.gate_up_proj.shape[0]} of {experts_of(self)} on this rank, expected all: expert "
            "parallelism of experts with biases is not covered"
        )
    weights, ids = uncast(self, router_indices, routing_weights).to(torch.float32), router_indices.to(torch.int32)
    x = hidden_states.reshape(-1, hidden_states.shape[-1])
    gate_up, down = self.gate_up_proj.transpose(1, 2), self.down_proj.transpose(1, 2)
    biases = {"gate_up_bias": self.gate_up_proj_bias, "down_bias": self.down_proj_bias}
    return vx.fused_moe(x, gate_up, down, weights, ids, activation=SWIGLU, **biases)


def experts_of(module: nn.Module) -> int:
    """How many experts there are, of which a rank may hold a part."""
    return getattr(module, "num_experts", None) or module.gate_up_proj.shape[0]


# router


class Form(NamedTuple):
    """Where a router has what it chooses by.

    weight  the child that holds the matrix; "": itself
    bias    likewise of the bias on scores; None: it has none
    given   its block calls it with the bias
    added   it has a bias of the logits, beside the matrix
    """

    weight: str = ""
    bias: str | None = None
    given: bool = False
    added: bool = False

    def matrix(self, router: nn.Module) -> Tensor:
        return (router._modules[self.weight] if self.weight else router).weight

    def children(self) -> set[str]:
        return {name for name in (self.weight, self.bias) if name}


def form_of(module: nn.Module) -> Form | None:
    """Of a module that chooses by a matrix, which is no linear layer itself."""
    if not hasattr(module, "top_k") or isinstance(module, nn.Linear):
        return None
    children = {name: child for name, child in module._modules.items() if child is not None}
    linear = [name for name, child in children.items() if class_of(child) is nn.Linear and child.bias is None]
    biased = [name for name, child in children.items() if {*child._parameters, *child._buffers} == {_BIAS}]
    own = module._parameters.get("weight")
    if own is not None and own.dim() == 2:
        weight = ""
    elif len(linear) == 1 and len(children) == 1 and not module._parameters:
        weight = linear[0]
    else:
        return None
    given = _BIAS in inspect.signature(inspect.unwrap(class_of(module).forward)).parameters
    bias = "" if given or _BIAS in {*module._parameters, *module._buffers} else biased[0] if biased else None
    added = module._parameters.get("bias")
    return Form(weight, bias, given, not weight and added is not None and added.dim() == 1)


def kept_in_fp32(model: nn.Module, dtype: torch.dtype = torch.bfloat16) -> set[str]:
    """Names of the parameters and buffers that transformers keeps in fp32 in a model of this dtype: routers, from its
    release 5.24 on, and those that a class has made so and computes by."""
    patterns: set[str] = set()
    if dtype != torch.float32:
        patterns |= set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        patterns |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    find = [re.compile(re.escape(pattern).replace(r"\*", ".*")).search for pattern in patterns]
    tensors = itertools.chain(
        model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    )
    named = {name for name, tensor in tensors if tensor.is_floating_point() and any(f(name) for f in find)}
    return named if dtype == torch.float32 else named | set(_made_in_fp32(model))


def _made_in_fp32(model: nn.Module) -> Iterator[str]:
    """Matrices of routers that are fp32, and that their class multiplies in the dtype that they have (HunYuan's):
    from_pretrained leaves what a class has made so as it is."""
    for path, module in model.named_modules(remove_duplicate=False):
        form = form_of(module)
        if form is not None and form.weight and form.matrix(module).dtype == torch.float32 and _by_dtype(module, form):
            yield f"{path}.{form.weight}.weight"


def _by_dtype(module: nn.Module, form: Form) -> bool:
    """Whether its logits of hidden states of 16 bits are fp32 where its matrix is, and of 16 bits where that is."""
    experts, hidden = form.matrix(module).shape
    x, weight, found = random(3, hidden, seed=1).bfloat16(), random(experts, hidden, seed=2), []
    for dtype in (torch.float32, torch.bfloat16):
        tried = twin(module, {form.weight: twin(module._modules[form.weight], parameters={"weight": weight.to(dtype)})})
        try:
            made = run_stock(tried, x)
        except NotCovered:
            return False
        found.append(made[0].dtype if isinstance(made, tuple) and isinstance(made[0], Tensor) else None)
    return found == [torch.float32, torch.bfloat16]


def is_router(module: nn.Module) -> bool:
    return form_of(module) is not None


def router_forward(module: nn.Module, kept: bool) -> tuple[Callable, str]:
    """The aligned forward of a router that returns (logits, weights, ids), and its options in words.

    kept  its weights are fp32 beside those of 16 bits: see _logits
    """
    form = form_of(module)
    return _router(module, lambda *found: (_router_forward(form, *found),), kept, form)


def _router(module: nn.Module, forwards: Callable, kept: bool, form: Form) -> tuple:
    held = {**module._parameters, **module._buffers}
    own = {"weight"} if form.weight == "" else set()
    own |= {_BIAS} if form.bias == "" and not form.given else set()
    own |= {"bias"} if form.added else set()
    if set(held) != own or any(value is None for value in held.values()) or set(module._modules) != form.children():
        raise NotCovered("a router of another form")
    experts, hidden = form.matrix(module).shape
    if isinstance(module.top_k, int) and not 0 < module.top_k <= experts:
        raise NotCovered(f"it chooses {module.top_k} of {experts} experts")
    if None not in (groups := _groups(module)) and isinstance(module.top_k, int) and experts % groups[0] == 0:
        among = experts // groups[0] * groups[1]
        if among < module.top_k:
            raise NotCovered(
                f"it chooses {module.top_k} of {experts} experts, but among {among} alone: those of {groups[1]} of "
                f"{groups[0]} groups (topk_group, n_group)"
            )
    weight, x = random(experts, hidden, seed=1) * 2 / hidden**0.5, random(_TOKENS, hidden, seed=2)
    bias = random(experts, seed=3) / 3 if form.bias is not None else None
    added = random(experts, seed=4) if form.added else None
    tries = [(x, weight, bias, added)]
    if None not in groups and 1 < groups[0] <= experts // 2:
        tries.append(_against_groups(experts, hidden, groups[0], bias, added))
    found = [_try(module, form, *tried) for tried in tries]
    logits = [x @ weight.t() + (0 if added is None else added) for x, weight, _, added in tries]
    for options in _options(module, found[0][1].shape[1]):
        if all(_same(*got, at, options, tried[2]) for got, at, tried in zip(found, logits, tries)):
            break
    else:
        raise NotCovered("a router whose scores or choice no aligned op computes")
    wide, rounded = _roundings(module, form, x, weight, bias, options)
    if kept and not wide:  # a class may compute by the dtype that its weights have; others do not run with theirs
        with contextlib.suppress(NotCovered):
            wide, rounded = _roundings(module, form, x, weight, bias, options, kept)
    label = " ".join(f"{key}={value}" for key, value in options.items() if value is not None)
    if kept and not wide:
        raise NotCovered("a router whose weights are kept in fp32, but whose logits are rounded")
    return *forwards(wide, rounded, kept, tuple(options.items())), label + (" fp32 weights" if kept else "")


def chooses(module: nn.Module) -> bool:
    """A block that chooses itself, by the logits that its router gives (DeepSeek-V3's before transformers 5.17)."""
    gate = module._modules.get("gate")
    weight = None if gate is None else gate._parameters.get("weight")
    return hasattr(type(module), CHOICE) and weight is not None and weight.dim() == 2


def choice_forwards(module: nn.Module, kept: bool) -> tuple[Callable, Callable, str]:
    """The aligned forward of such a block's router, the block's aligned choice, and its options in words."""
    joined = _Joined(module)
    return _router(joined, _choice_forwards, kept, Form(bias="" if _BIAS in joined._all() else None))


class _Joined(nn.Module):
    """Such a block's router and choice, as one router to be tried."""

    def __init__(self, block: nn.Module):
        super().__init__()
        gate = block.gate
        self.__dict__.update(
            block=block, gate=gate, config=getattr(block, "config", None), top_k=getattr(block, "top_k", None)
        )
        self._parameters, self._buffers = dict(gate._parameters), dict(gate._buffers)

    def _all(self) -> set[str]:
        return {*self._parameters, *self._buffers}

    def forward(self, hidden_states):
        gate = twin(self.gate)
        gate.__dict__.update(_parameters=self._parameters, _buffers=self._buffers)
        logits = run_stock(gate, hidden_states)
        ids, weights = getattr(twin(self.block, {"gate": gate}), CHOICE)(logits)
        return logits, weights, ids


@functools.cache
def _choice_forwards(wide: bool, rounded: bool, kept: bool, options: tuple) -> tuple[Callable, Callable]:
    options = dict(options)
    top_k = options.pop("top_k")

    def gate_forward(self, hidden_states):
        return _logits(self.weight, hidden_states, wide, kept)

    def route_tokens_to_experts(self, router_logits):
        weights, ids = vx.moe_route(router_logits, top_k, bias=_bias(self.gate), **options)
        if rounded:
            return ids, weights.to(self.gate.weight.dtype)
        give(ids, weights)
        return ids, weights

    return gate_forward, route_tokens_to_experts


def check_block(module: nn.Module) -> None:
    """Of a router and experts side by side: it chooses among as many as there are. An id of no expert would be an empty
    slot to fused_moe."""
    children = [child for child in module._modules.values() if child is not None]
    forms = [(child, form) for child in children if (form := form_of(child)) is not None]
    routed = [form.matrix(child).shape[0] for child, form in forms]
    held = [experts_of(child) for child in children if is_experts(child)]
    if routed and held and set(routed) != set(held):
        raise NotCovered(f"its router chooses among {routed[0]} experts, but it holds {held[0]}")


def _put(owner: nn.Module, name: str, value: Tensor) -> None:
    """In the place of one of a twin's, in that one's shape."""
    where = "_parameters" if name in owner._parameters else "_buffers"
    value = value.reshape(*getattr(owner, where)[name].shape[: -value.dim()], *value.shape)
    value = nn.Parameter(value) if where == "_parameters" else value
    owner.__dict__[where] = {**owner.__dict__[where], name: value}


def _try(
    module: nn.Module, form: Form, x: Tensor, weight: Tensor, bias: Tensor | None, added: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The router's own weights and ids for a weight and bias of ours."""
    tried = twin(module, {name: twin(module._modules[name]) for name in form.children()})
    owners = {"": tried, **tried._modules}
    _put(owners[form.weight], "weight", weight)
    if form.added:
        _put(tried, "bias", weight.new_zeros(len(weight)) if added is None else added)
    if bias is not None and not form.given:
        _put(owners[form.bias], _BIAS, bias)
    got = run_stock(tried, x, *([bias] if form.given else []))
    if not isinstance(got, tuple) or len(got) != 3 or got[1].shape != got[2].shape or got[1].shape[:1] != x.shape[:1]:
        raise NotCovered("a router that does not return logits, weights and ids")
    return got[1], got[2]


def _of(module: nn.Module, *names: str):
    owners = (module, getattr(module, "config", None))
    return next((getattr(o, name) for o in owners for name in names if getattr(o, name, None) is not None), None)


def _groups(module: nn.Module) -> tuple[int | None, int | None]:
    """Into how many groups its experts fall, and of how many of these it chooses, if it reads that."""
    return _of(module, "num_group", "n_group"), _of(module, "topk_group")


def _against_groups(experts: int, hidden: int, groups: int, bias: Tensor | None, added: Tensor | None) -> tuple:
    """A trial whose likeliest expert is in the least likely group: where most groups are kept, it is seldom so."""
    count = min(hidden, 8)
    logits = 0.5 + random(count, experts, seed=5).sigmoid()
    for token, expert in enumerate(range(0, experts, -(-experts // count))):
        first = expert // (experts // groups) * (experts // groups)
        logits[token, first : first + experts // groups] -= 4
        logits[token, expert] = 3
    weight = torch.zeros(experts, hidden, dtype=logits.dtype)
    weight[:, :count] = logits.t()
    x = torch.eye(hidden, dtype=logits.dtype)[:count]
    return x, weight, *(None if t is None else torch.zeros_like(t) for t in (bias, added))


def _options(module: nn.Module, top_k: int):
    groups = _groups(module)
    scales = dict.fromkeys((1.0, float(_of(module, "routed_scaling_factor", "router_scaling_factor") or 1.0)))
    kinds = [(None, None)] if None in groups else [(None, None), groups]
    for score, normalize, (count, kept), scale in itertools.product(SCORES, (True, False), kinds, scales):
        yield {
            "top_k": top_k,
            "score": score,
            "normalize": normalize,
            "groups": count,
            "top_k_groups": kept,
            "scale": scale,
        }


def _same(weights: Tensor, ids: Tensor, logits: Tensor, options: dict, bias: Tensor | None) -> bool:
    """The same experts, in any order, with the same weights."""
    try:
        expected, expected_ids = moe_route_ref(logits, bias=bias, **options)
    except RuntimeError:  # groups that do not divide the experts
        return False
    (ids, order), (expected_ids, expected_order) = ids.sort(1), expected_ids.sort(1)
    return torch.equal(ids, expected_ids.to(ids.dtype)) and agree(
        weights.gather(1, order), expected.gather(1, expected_order)
    )


def _roundings(
    module: nn.Module, form: Form, x: Tensor, weight: Tensor, bias: Tensor | None, options: dict, kept: bool = False
) -> tuple[bool, bool]:
    """Where a bf16 model rounds: whether the scores are of fp32 logits, and whether the weights are rounded to bf16.

    All logits are moved by a constant that softmax does not see and sigmoid turns into a factor: at -32 bf16 rounds
    them by up to 0.06, and a weight with them by 6 %, far more than a weight's own rounding. Where a weight is always 1
    (one expert, normalised) the choice must tell: at -256, logits are equal after their rounding as often as not; at
    -64, where their sigmoids are numbers of fp32 yet, which no bias is to outweigh, in one row of 25.
    """
    always_1, sigmoid = options["top_k"] == 1 and options["normalize"], options["score"] != "softmax"
    if always_1:
        x = random(10 * _TOKENS, x.shape[1], seed=2) if sigmoid else x
        bias = None if bias is None else torch.zeros_like(bias)
    x, weight = x.bfloat16(), weight.bfloat16()
    x[:, 0], weight[:, 0] = 8, (-8 if sigmoid else -32) if always_1 else -4
    held = weight.float() if kept else weight
    got, ids = _try(module, form, x, held, None if bias is None else bias.float())
    if got.dtype not in (torch.float32, torch.bfloat16):
        raise NotCovered(f"a router whose weights are {got.dtype}")
    logits = x.double() @ weight.double().t()
    same = []  # how many rows are those of fp32 logits, and of logits rounded to bf16
    for seen in (logits, logits.bfloat16().double()):
        expected, expected_ids = moe_route_ref(seen, bias=bias, **options)
        if always_1:
            rows = ids == expected_ids
        else:  # sorted: among equal logits either may be chosen
            rows = (got.double().sort(1)[0] / expected.sort(1)[0] - 1).abs() <= 2**-8
        same.append(float(rows.all(1).double().mean()))
    if always_1:
        return same[0] > (0.995 if sigmoid else 0.999), got.dtype == torch.bfloat16
    if max(same) < 0.9 or min(same) > 0.7:
        raise NotCovered("a router that rounds in a way that no aligned op repeats")
    return same[0] > same[1], got.dtype == torch.bfloat16


# fp32 -> dtype -> fp32, seen as one operation: Inductor leaves out a pair of casts (torch 2.11 does so even with
# emulate_precision_casts), and between router and experts they follow each other, forward and backward.
_rounded = Operator(
    "rounded(Tensor x, ScalarType dtype) -> Tensor",
    lambda x, dtype: x.to(dtype).to(x.dtype),
    lambda x, dtype: torch.empty_like(x),
    lambda ctx, inputs, output: setattr(ctx, "dtype", inputs[1]),
    lambda ctx, dy: (_rounded(dy, ctx.dtype), None),
)


@functools.cache
def _router_forward(form: Form, wide: bool, rounded: bool, kept: bool, options: tuple) -> Callable:
    options = dict(options)
    top_k = options.pop("top_k")

    def router_forward(self, hidden_states, e_score_correction_bias=None):
        logits = _logits(form.matrix(self), hidden_states, wide, kept, self.bias if form.added else None)
        owner = self._modules[form.bias] if form.bias else self
        bias = e_score_correction_bias if form.given else getattr(owner, _BIAS, None)
        bias = None if bias is None else bias.float().flatten()
        weights, ids = vx.moe_route(logits, top_k, bias=bias, **options)
        if rounded:
            if torch.compiler.is_compiling():
                weights = _rounded(weights, hidden_states.dtype)
            weights = weights.to(hidden_states.dtype)
        else:
            give(ids, weights)
        return logits, weights, ids

    return router_forward


def _logits(weight: Tensor, hidden_states: Tensor, wide: bool, kept: bool, bias: Tensor | None = None) -> Tensor:
    """Weights that a class keeps in fp32 are multiplied in fp32 whatever holds them now: FSDP2's mixed precision rounds
    them for its forward, and on a GPU a product of 16 bits has other bits than one in fp32 of equal values."""
    x = hidden_states.reshape(-1, hidden_states.shape[-1])
    if not wide:
        return vx.linear(x, weight, bias)
    if kept and weight.dtype != torch.float32 and not torch.compiler.is_compiling():
        _say_rounded(weight.dtype)
    if kept or weight.dtype != x.dtype:
        x, weight = x.float(), weight.float()
        bias = None if bias is None else bias.float()
    return vx.linear(x, weight, bias, out_dtype=torch.float32)


@functools.cache
def _say_rounded(dtype: torch.dtype) -> None:
    _LOG.warning(
        "patch.hf: routers that transformers keeps in fp32 are %s here (by FSDP2's mixed precision, or a cast): their "
        "logits are an engine's where that is given them so rounded, not where it is given fp32 masters", dtype
    )  # fmt: skip


def _bias(router: nn.Module) -> Tensor | None:
    bias = getattr(router, _BIAS, None)
    return None if bias is None else bias.float()
