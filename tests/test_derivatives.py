"""What the ops say to who asks for more than first derivatives in reverse mode, and what a profiler sees of them.

One table holds every op; a test fails where an op is missing from it. Nothing here may be answered in silence: a
gradient of a gradient that is not there has come out as zero before.
"""

import dataclasses
import importlib

import pytest
import torch
from conftest import devices
from torch import Tensor
from torch.autograd import forward_ad

import vexact_ops as vx
from vexact_ops._core.operator import Operator
from vexact_ops.testing import assert_bitwise

DEVICES = pytest.mark.parametrize("device,dtype", devices(torch.float32))


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def ints(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


@dataclasses.dataclass(frozen=True)
class Case:
    """A call of one op. Its first `learns` tensors have gradients; `plain` is the same in PyTorch's operations, of an
    op that is differentiable as often as one likes."""

    args: tuple
    learns: int
    options: dict = dataclasses.field(default_factory=dict)
    plain: object = None

    def tensors(self, device) -> list:
        return [a.to(device) if isinstance(a, Tensor) else a for a in self.args]


def turned(q, k, cos, sin):
    def turn(x):
        a, b = x.chunk(2, -1)
        return x * cos[:, None] + torch.cat((-b, a), -1) * sin[:, None]

    return turn(q), turn(k)


def delta_rows(rows):
    """q, k, v, g, beta of gated_delta."""
    q, k, v = numbers(rows, 1, 16), numbers(rows, 1, 16, seed=1), numbers(rows, 2, 16, seed=2)
    return q, k, v, -numbers(rows, 2, seed=3).abs(), numbers(rows, 2, seed=4).sigmoid()


LONG = torch.int64
CASES = {
    "linear": Case((numbers(3, 16), numbers(8, 16, seed=1), numbers(8, seed=2)), 3),
    "bmm": Case((numbers(2, 3, 16), numbers(2, 16, 8, seed=1)), 2, plain=torch.bmm),
    "grouped_linear": Case((numbers(3, 16), numbers(4, 8, 16, seed=1), ints(0, 1, 1, 3, 3)), 2),
    "moe_route": Case((numbers(3, 8), 2), 1),
    "fused_moe": Case(
        (
            *(numbers(3, 16), numbers(4, 16, 16, seed=1), numbers(4, 16, 8, seed=2), torch.rand(3, 2)),
            ints(0, 3, 1, 2, 2, 3).view(3, 2),
        ),
        4,
    ),
    "rmsnorm": Case((numbers(3, 16), numbers(16, seed=1)), 2),
    "rmsnorm_gated": Case((numbers(3, 16), numbers(3, 16, seed=1), numbers(16, seed=2)), 3),
    "layer_norm": Case((numbers(3, 16), numbers(16, seed=1), numbers(16, seed=2)), 3),
    "rope": Case(
        (numbers(3, 2, 16), numbers(3, 1, 16, seed=1), numbers(3, 16, seed=2), numbers(3, 16, seed=3)), 2, plain=turned
    ),
    "rope_cos_sin": Case((ints(0, 1, dtype=LONG), numbers(8).abs()), 0),
    "rope_kv_store": Case(
        (
            *(numbers(2, 2, 16), numbers(2, 1, 16), numbers(2, 1, 16), numbers(2, 16), numbers(2, 16)),
            *(numbers(4, 4, 1, 16), numbers(4, 4, 1, 16), ints(3, 9, dtype=LONG)),
        ),
        0,
    ),
    "linear_silu_mul": Case((numbers(3, 16), numbers(8, 16, seed=1), numbers(8, seed=2)), 0),
    "silu_mul": Case((numbers(3, 16), numbers(3, 16, seed=1)), 2),
    "gelu": Case((numbers(3, 16),), 1),
    "sigmoid_mul": Case((numbers(3, 16), numbers(3, 16, seed=1)), 2),
    "causal_conv": Case((numbers(3, 16), numbers(16, 4, seed=1), numbers(16, seed=2)), 3),
    "causal_conv_paged": Case(
        (numbers(1, 16), numbers(16, 4), numbers(16), numbers(2, 4, 16), ints(1), ints(5), ints(0, 1)), 0
    ),
    "gated_delta_varlen": Case((*delta_rows(3), ints(0, 3)), 5),
    "gated_delta_paged": Case(
        (
            *(*delta_rows(1), numbers(2, 2, 16, 16), numbers(2, 64, 1, 16), numbers(2, 64, 2, 16)),
            *(numbers(2, 64, 2), ints(1), ints(5), ints(0, 1), 1),
        ),
        0,
    ),
    "delta_gates": Case((numbers(3, 4), numbers(3, 4, seed=1), numbers(4, seed=2), numbers(4, seed=3)), 4),
    "log_softmax": Case((numbers(3, 16),), 1),
    "mean": Case((numbers(3, 16),), 1),
    "sum": Case((numbers(3, 16),), 1),
    "linear_logits": Case((numbers(3, 16), numbers(8, 16, seed=1)), 2, {"softcap": 5.0}),
    "linear_logprobs": Case((numbers(3, 16), numbers(8, 16, seed=1), ints(0, 1, 2, dtype=LONG)), 2),
    "linear_cross_entropy": Case((numbers(3, 16), numbers(8, 16, seed=1), ints(0, 1, 2, dtype=LONG)), 2),
    "attention_varlen": Case(
        (numbers(3, 2, 16), numbers(3, 1, 16, seed=1), numbers(3, 1, 16, seed=2), ints(0, 3)), 3, {"max_seqlen": 3}
    ),
    "attention_paged": Case(
        (numbers(1, 2, 16), numbers(4, 4, 1, 16), numbers(4, 4, 1, 16), ints(1, 2)[None], ints(5), ints(0, 1)),
        0,
        {"max_seqlen_q": 1},
    ),
    "kv_cache_store": Case(
        (numbers(2, 1, 16), numbers(2, 1, 16), numbers(4, 4, 1, 16), numbers(4, 4, 1, 16), ints(3, 9, dtype=LONG)), 0
    ),
    "linear_sample": Case((numbers(2, 16), numbers(8, 16, seed=1), ints(1, 2, dtype=LONG), ints(5, 6, dtype=LONG)), 0),
    "sample": Case((numbers(2, 50), ints(1, 2, dtype=LONG), ints(5, 6, dtype=LONG)), 0),
}
LEARNING = [name for name, case in CASES.items() if case.learns]
NAMES = pytest.mark.parametrize("name", CASES)
INNER = {"linear_logits": "linear|linear_logits|softcap", "sum": "mean"}  # an op whose operator has another name


def called(name: str, tensors: list, function=None) -> list[Tensor]:
    """The results that have gradients, where some have."""
    case = CASES[name]
    out = (function or getattr(vx, name))(*tensors, **({} if function else case.options))
    outputs = [t for t in (out if isinstance(out, tuple) else (out,)) if isinstance(t, Tensor)]
    return [t for t in outputs if t.requires_grad] or outputs


def learning(name: str, device) -> tuple[list, list[Tensor]]:
    """Arguments, and those among them that want a gradient."""
    tensors = CASES[name].tensors(device)
    wanted = [t.detach().clone().requires_grad_() for t in tensors[: CASES[name].learns]]
    return [*wanted, *tensors[len(wanted) :]], wanted


def objective(outputs: list[Tensor]) -> Tensor:
    """Not linear in them: a second derivative of a linear op is 0 otherwise."""
    return sum(t.float().square().sum() for t in outputs)


def operators(name: str, device, monkeypatch, backward: bool = True) -> dict[Operator, tuple]:
    """The operators that a call of the op and its backward pass run, with their arguments."""
    ran, call = {}, Operator.__call__

    def recorded(operator, *args):
        ran.setdefault(operator, args)
        return call(operator, *args)

    with monkeypatch.context() as patched:
        patched.setattr(Operator, "__call__", recorded)
        args, wanted = learning(name, device)
        outputs = called(name, args)
        if backward and wanted:
            torch.autograd.grad(objective(outputs), wanted)
    return ran


# the table


def test_the_table_holds_every_op(monkeypatch):
    importlib.import_module("vexact_ops.patch")  # registers one more
    public = {name for name, where in vx._WHERE.items() if not where.startswith("_core") and "admit" not in name}
    assert public - {"explain"} == set(CASES)
    ran = {operator.name for name in CASES for operator in operators(name, "cpu", monkeypatch)}
    known = {n.removeprefix("vexact::") for n in torch._C._dispatch_get_all_op_names() if n.startswith("vexact::")}
    assert known - ran == {"rounded"}  # tests/patch/test_hf_mixtures.py has it


# twice


@pytest.mark.parametrize("name", LEARNING)
@DEVICES
def test_the_first_gradient_is_the_same_under_create_graph(name, device, dtype):
    args, wanted = learning(name, device)
    outputs = called(name, args)
    once = torch.autograd.grad(objective(outputs), wanted, retain_graph=True)
    assert_bitwise(torch.autograd.grad(objective(outputs), wanted, retain_graph=True), once, "a second time")
    kept = torch.autograd.grad(objective(outputs), wanted, create_graph=True)
    assert_bitwise([g.detach() for g in kept], once)


@pytest.mark.parametrize("name", LEARNING)
@DEVICES
def test_a_gradient_of_the_gradient_is_right_or_refused(name, device, dtype):
    """A gradient penalty: of each gradient alone, by backward and by autograd.grad."""

    def penalty(function=None):
        args, wanted = learning(name, device)
        grads = torch.autograd.grad(objective(called(name, args, function)), wanted, create_graph=True)
        return wanted, [g.square().sum() for g in grads]

    plain = CASES[name].plain
    for which in range(CASES[name].learns):
        wanted, penalties = penalty()
        if plain is None:
            message = f"^({INNER.get(name, name)}): a gradient of its gradient was asked for"
            with pytest.raises(NotImplementedError, match=message):
                torch.autograd.grad(penalties[which], wanted)
            wanted, penalties = penalty()
            with pytest.raises(NotImplementedError, match=message):
                penalties[which].backward()
        else:
            got = torch.autograd.grad(penalties[which], wanted, materialize_grads=True)
            wanted, penalties = penalty(plain)
            expected = torch.autograd.grad(penalties[which], wanted, materialize_grads=True)
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@NAMES
@DEVICES
def test_every_operator_refuses_what_it_has_no_gradient_of(name, device, dtype, monkeypatch):
    """Through torch.ops.vexact, those of backward passes too: an output is differentiable, or says why it is not."""
    for operator, given in operators(name, device, monkeypatch).items():
        args = [a.detach().clone() if isinstance(a, Tensor) else a for a in given]
        written = {i for i, a in enumerate(operator.op._schema.arguments) if a.alias_info}
        wanted = [a for i, a in enumerate(args) if isinstance(a, Tensor) and a.is_floating_point() and i not in written]
        for t in wanted:
            t.requires_grad_()
        out = operator.op(*args)
        for t in out if isinstance(out, tuple) else (out,):
            if not isinstance(t, Tensor) or not t.numel() or not t.requires_grad:
                continue
            if operator.backward is not None:
                torch.autograd.grad(t.sum(), wanted, allow_unused=True, retain_graph=True)
            else:
                with pytest.raises(NotImplementedError, match=rf"^{operator._asked()}: .* gradient .* asked for"):
                    torch.autograd.grad(t.sum(), wanted, allow_unused=True, retain_graph=True)
        if operator.backward is None and not written:
            outputs = [t for t in (out if isinstance(out, tuple) else (out,)) if t.is_floating_point()]
            assert all(t.requires_grad for t in outputs), "no gradient, in silence"


# forward mode, and torch.func


@pytest.mark.parametrize("name", LEARNING)
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "forward over reverse"])
@DEVICES
def test_forward_mode_is_refused(name, reverse, device, dtype):
    for which in range(CASES[name].learns):
        args, _ = learning(name, device)
        if not reverse:
            args = [t.detach() if isinstance(t, Tensor) else t for t in args]
        with forward_ad.dual_level():
            args[which] = forward_ad.make_dual(args[which], torch.ones_like(args[which]))
            with pytest.raises(NotImplementedError, match=rf"^({INNER.get(name, name)}): got a dual tensor"):
                called(name, args)
            constants = [t.detach() if isinstance(t, Tensor) else t for t in CASES[name].tensors(device)]
            called(name, constants)  # the others' calls go on


@NAMES
@DEVICES
def test_operators_refuse_forward_mode(name, device, dtype, monkeypatch):
    for operator, given in operators(name, device, monkeypatch).items():
        floats = [i for i, a in enumerate(given) if isinstance(a, Tensor) and a.is_floating_point() and a.numel()]
        for which in floats:
            args = [a.detach().clone() if isinstance(a, Tensor) else a for a in given]
            with forward_ad.dual_level():
                args[which] = forward_ad.make_dual(args[which], torch.ones_like(args[which]))
                with pytest.raises(NotImplementedError, match=rf"^{operator._asked()}: got a dual tensor"):
                    operator.op(*args)
                with pytest.raises(NotImplementedError, match=rf"^{operator._asked()}: got a dual tensor"):
                    operator(*args)


@pytest.mark.parametrize("name", LEARNING)
@pytest.mark.parametrize("transform", ["grad", "vjp", "jvp", "jacrev", "jacfwd", "hessian", "grad of grad"])
def test_transforms_of_torch_func_are_refused(name, transform):
    tensors = CASES[name].tensors("cpu")

    def loss(x):
        return objective(called(name, [x, *tensors[1:]]))

    func = torch.func
    call = {
        "vjp": lambda x: func.vjp(loss, x),
        "jvp": lambda x: func.jvp(loss, (x,), (torch.ones_like(x),)),
        "grad of grad": func.grad(lambda x: func.grad(loss)(x).square().sum()),
    }
    call = call.get(transform) or getattr(func, transform)(loss)
    with pytest.raises(NotImplementedError, match=rf"^({INNER.get(name, name)}): .*torch.func"):
        call(tensors[0])


@pytest.mark.parametrize("name", LEARNING)
def test_vmap_is_a_loop(name):
    """PyTorch's own fallback: an op has no batched form, and needs none for the bits to be right."""
    tensors = CASES[name].tensors("cpu")
    batch = torch.stack([tensors[0], tensors[0].flip(0), 2 * tensors[0]])

    def call(x):
        return tuple(called(name, [x, *tensors[1:]]))

    got = torch.func.vmap(call)(batch)
    expected = [torch.stack(results) for results in zip(*(call(x) for x in batch))]
    assert_bitwise(list(got), expected)


# profiles


@NAMES
@DEVICES
def test_a_profile_shows_every_op_by_its_name(name, device, dtype, monkeypatch):
    ran = operators(name, device, monkeypatch, backward=False)
    tensors = CASES[name].tensors(device)
    with torch.no_grad():
        called(name, tensors)
        for profile in (torch.profiler.profile, torch.autograd.profiler.profile):
            with profile() as seen:
                called(name, tensors)
            shown = {event.key for event in seen.key_averages()}
            assert {f"vexact::{operator.name}" for operator in ran} <= shown
