"""What the ops say to who asks for more than first derivatives in reverse mode, and what a profiler sees of them.

Calls are op_cases', which hold every op (test_default_dtype.py). Nothing here may be answered in silence: a
gradient of a gradient that is not there has come out as zero before.
"""

import importlib

import op_cases
import pytest
import torch
from conftest import devices
from torch import Tensor
from torch.autograd import forward_ad

import vexact_ops as vx
from vexact_ops._core.operator import Operator
from vexact_ops.testing import assert_bitwise

DEVICES = pytest.mark.parametrize("device,dtype", devices(torch.float32))


def turned(q, k, cos, sin):
    def turn(x):
        a, b = x.chunk(2, -1)
        return x * cos[:, None] + torch.cat((-b, a), -1) * sin[:, None]

    return turn(q), turn(k)


# op -> its first case in op_cases
FIRST: dict[str, str] = {}
for _case in op_cases.CASES:
    FIRST.setdefault(_case.split(".")[0], _case)
FIRST["fused_moe.swigluoai"] = "fused_moe.swigluoai"  # another operator
FIRST["linear_silu_mul"] = "linear_silu_mul.one"  # where a gradient is wanted it is two other ops
PLAIN = {"bmm": torch.bmm, "rope": turned}  # ops that are differentiable as often as one likes, in PyTorch's operations


OPTIONS: dict[tuple[str, str], dict] = {}  # of what `given` has made: inside a transform nothing is drawn


def given(name: str, device) -> tuple[list, dict]:
    """What an op is called with; of its tensors those want a gradient that have one."""
    args, options = op_cases.CASES[FIRST[name]][1](op_cases.Inputs(torch.float32, device))
    OPTIONS[name, torch.device(device).type] = options
    none = not op_cases.NO_GRADIENT.isdisjoint((name, FIRST[name]))
    return [a.detach() if none and isinstance(a, Tensor) else a for a in args], options


def tensors_of(name: str, device) -> list:
    return [a.detach() if isinstance(a, Tensor) else a for a in given(name, device)[0]]


def _learns(name: str) -> int:
    """How many of the first arguments have gradients."""
    wants = [isinstance(a, Tensor) and a.requires_grad for a in given(name, "cpu")[0]]
    assert wants == sorted(wants, reverse=True), f"{name}: one that has a gradient stands behind one that has none"
    return sum(wants)


LEARNS = {name: _learns(name) for name in FIRST}
LEARNING = [name for name, learns in LEARNS.items() if learns]
NAMES = pytest.mark.parametrize("name", FIRST)
# an op whose operator has another name
INNER = {"linear_logits": "linear|linear_logits|softcap", "sum": "mean", "fused_moe.swigluoai": "fused_moe_swiglu"}


def called(name: str, tensors: list, function=None) -> list[Tensor]:
    """The results that have gradients, where some have."""
    options = {} if function else OPTIONS[name, tensors[0].device.type]
    out = (function or getattr(vx, name.partition(".")[0]))(*tensors, **options)
    outputs = [t for t in (out if isinstance(out, tuple) else (out,)) if isinstance(t, Tensor)]
    return [t for t in outputs if t.requires_grad] or outputs


def learning(name: str, device) -> tuple[list, list[Tensor]]:
    """Arguments, and those among them that want a gradient."""
    tensors = tensors_of(name, device)
    wanted = [t.clone().requires_grad_() for t in tensors[: LEARNS[name]]]
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


def test_every_operator_runs_in_a_case(monkeypatch):
    importlib.import_module("vexact_ops.patch")  # registers one more
    ran = {operator.name for name in FIRST for operator in operators(name, "cpu", monkeypatch)}
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

    plain = PLAIN.get(name)
    for which in range(LEARNS[name]):
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
            for ours, theirs in zip(got, expected, strict=True):
                assert (ours - theirs).abs().max() <= 2e-6 * theirs.abs().max()


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


@NAMES
@DEVICES
def test_a_call_that_passes_the_dispatcher_is_the_one_that_does_not(name, device, dtype, monkeypatch):
    """An operator's node beside torch.ops.vexact, which a profiler has it go through: outputs, gradients and names."""
    for operator, given in operators(name, device, monkeypatch).items():
        written = any(a.alias_info for a in operator.op._schema.arguments)
        if operator.backward is None or written:
            continue

        def ran(call, given=given):
            args = [a.detach().clone() if isinstance(a, Tensor) else a for a in given]
            wanted = [a.requires_grad_() for a in args if isinstance(a, Tensor) and a.is_floating_point()]
            out = call(*args)
            out = [t for t in (out if isinstance(out, tuple) else (out,)) if t.requires_grad]
            names = [t.grad_fn.name() for t in out]
            grads = torch.autograd.grad([t.float().square().sum() for t in out], wanted, allow_unused=True)
            return names, [*out, *(g for g in grads if g is not None)]

        (names, got), (expected_names, expected) = ran(operator), ran(operator.op)
        assert names == expected_names and names and len(got) == len(expected) > len(names)
        assert all(vx.same_bits(a, b) for a, b in zip(got, expected))


# forward mode, and torch.func


@pytest.mark.parametrize("name", LEARNING)
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "forward over reverse"])
@DEVICES
def test_forward_mode_is_refused(name, reverse, device, dtype):
    for which in range(LEARNS[name]):
        args, _ = learning(name, device)
        if not reverse:
            args = [t.detach() if isinstance(t, Tensor) else t for t in args]
        with forward_ad.dual_level():
            args[which] = forward_ad.make_dual(args[which], torch.ones_like(args[which]))
            with pytest.raises(NotImplementedError, match=rf"^({INNER.get(name, name)}): got a dual tensor"):
                called(name, args)
            called(name, tensors_of(name, device))  # the others' calls go on


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
    tensors = tensors_of(name, "cpu")

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
    tensors = tensors_of(name, "cpu")
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
    tensors = tensors_of(name, device)
    with torch.no_grad():
        called(name, tensors)
        for profile in (torch.profiler.profile, torch.autograd.profiler.profile):
            with profile() as seen:
                called(name, tensors)
            shown = {event.key for event in seen.key_averages()}
            assert {f"vexact::{operator.name}" for operator in ran} <= shown
