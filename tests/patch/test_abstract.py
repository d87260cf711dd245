"""A forward on abstract tensors is the forward that FakeTensorMode runs, operation by operation; what kernels for meta
do not settle runs there."""

import contextlib
import functools

import pytest
import torch
from families import HYBRIDS, MIXTURES, NAMED, family, tiny
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import vexact_ops as vx
from vexact_ops.patch import abstract, audit, plan


def shown(x):
    """All that there is to know of it: of a tensor shape, strides (of a single row it is any), place, dtype, device."""
    if isinstance(x, torch.Tensor):
        strides = [step for step, size in zip(x.stride(), x.shape) if size > 1]
        return tuple(x.shape), strides, x.storage_offset(), x.dtype, x.device
    if isinstance(x, dict):
        return {name: shown(each) for name, each in x.items()}
    return tuple(map(shown, x)) if isinstance(x, (list, tuple)) else x


def modes():
    """What a forward runs in first, and where that does not know."""
    return (abstract._AbstractMode(),), (FakeTensorMode(allow_non_fake_inputs=True), abstract.Observed())


def under(mode, program, *given):
    with torch.no_grad(), contextlib.ExitStack() as stack:
        return program(*given, [stack.enter_context(each) for each in mode][-1])


def operations(model, observed):
    """Of the patched model's forward."""
    seen, caller = [], audit.Caller(model, functools.partial(plan._small_call, patch=model._vexact))
    fakes, _ = audit.fake_copies(caller)
    ids = torch.zeros(2, 3, dtype=torch.int64)

    def saw(func, *call):
        if func.namespace != "prim":  # where a tensor is: an abstract one answers that itself
            seen.append((str(func), *map(shown, call)))

    observed.saw = saw
    torch.func.functional_call(caller, fakes, (ids,), tie_weights=False)
    observed.saw = None
    return seen


def test_copies_of_a_model_that_is_partly_offloaded_are_on_one_device():
    model = nn.ParameterDict()
    with FakeTensorMode():
        for device in ("cpu", "cuda", "meta"):
            model[f"on_{device}"] = nn.Parameter(torch.empty(2, device=device))
    fakes, device = under(modes()[1], lambda mode: audit.fake_copies(model))
    assert device.type == "cuda" and {fake.device.type for fake in fakes.values()} == {"cuda"}


@pytest.mark.parametrize("name", [family(name) for name in (*NAMED, *MIXTURES, *HYBRIDS)])
def test_a_forward_runs_the_same_operations(name):
    model = tiny(name, torch.bfloat16)
    with vx.patch.hf(model):
        short, full = (under(mode, operations, model) for mode in modes())
    assert short == full and len(full) > 100


def in_both(program, *given):
    """What a program makes of tensors in each mode."""
    return [under(mode, lambda *given: program(*given[:-1]), *given) for mode in modes()]


PROGRAMS = {
    "new ones": lambda x: (x.new_zeros(3), torch.arange(4), torch.zeros_like(x, dtype=torch.int32), torch.tensor(2.5)),
    "views": lambda x: (x.t(), x[1:], x.chunk(2, -1), x.unfold(1, 2, 1), x.expand(2, *x.shape), x.flatten()),
    "casts": lambda x: (x.double(), x.to(torch.bool), x.float() if x.dtype != torch.float32 else x, x.to("cpu")),
    "sums": lambda x: (x.sum(), x.mean(-1), x.cumsum(0), torch.softmax(x, -1), x @ x.t(), torch.addmm(x[0], x, x.t())),
    "a number": lambda x: (x + torch.tensor(2.0), x * torch.ones((), dtype=torch.float64), 2 - x),
    "choice": lambda x: (torch.topk(x, 2), torch.where(x > 0, x, 0), x.argmax(-1), x.sort(), x.gather(0, x.long())),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_make_the_same(name):
    short, full = in_both(PROGRAMS[name], torch.randn(4, 4))
    assert shown(short) == shown(full)


def test_in_place_is_in_place():
    def program(x):
        y = x.clone()
        return y.add_(1) is y, y[0].zero_().shape, y.copy_(x) is y, torch.add(y, 1, out=y) is y

    assert program(torch.randn(4, 4)) == tuple(in_both(program, torch.randn(4, 4))[0])


def test_what_a_number_decides_runs_in_the_other_mode():
    kinds = []

    def forward(mode):
        x = torch.arange(3) + torch.tensor(1)
        kinds.append(type(x))
        return int(torch.tensor(7)) + x.shape[0] if type(x) is FakeTensor else int(torch.tensor(7))

    assert abstract.run(forward) == 10 and kinds == [abstract.Abstract, FakeTensor]
    with pytest.raises(RuntimeError, match=r"_local_scalar_dense"):
        abstract.run(lambda mode: int(torch.arange(3).sum()))


def test_what_is_not_exact_is_seen():
    """The twin: a sum outside the aligned ops, in a module that looks like none."""

    class Sums(nn.Module):
        def forward(self, x):
            return x + x.sum(-1, keepdim=True)

    model = tiny("llama")
    with vx.patch.hf(model):
        model.model.layers[1].mlp.act_fn = Sums()
        with pytest.raises(vx.patch.UnsupportedModule, match=r"act_fn"):
            model(torch.zeros(1, 3, dtype=torch.int64))
    module = Sums()
    found = audit.run(module, {id(module): "sums"}, lambda module, ids: module(ids.float()))
    assert found == {"sums": {"aten.sum"}}


def test_an_abstract_tensor_is_of_no_use_afterwards():
    with abstract._AbstractMode():
        x = torch.zeros(3)
    with pytest.raises(NotImplementedError, match=r"aten\.add\.Tensor: called with an abstract tensor after"):
        x + 1
