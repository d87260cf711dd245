"""gated_delta's admission, without a GPU: what each part is tried on can be made, goes through the canonical kernels,
through the operators of the fast ones, and into the race. CPU kernels stand for those of Triton and of SM90."""

import itertools

import pytest
import torch
from test_gated_delta_step import Kernels

import vexact_ops as vx
from vexact_ops._core import admit, choices
from vexact_ops._core.admit import admitted
from vexact_ops._core.backend import PROBES

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(bool(PROBES["cpu"]()), reason="the compiled extension is missing")
SIZES = 1, 2, 16, 16  # Hk, Hv, dk, dv


def whole(q, k, v, g, beta, cu, initial, scale, l2norm):
    """The outputs and the final states."""
    given = {"scale": scale, "qk_l2norm": l2norm, "initial_state": initial}
    return vx.gated_delta_varlen(q, k, v, g, beta, cu, return_final_state=True, **given)


def keep_states(q, k, v, g, beta, cu, initial, scale, l2norm, states, us):
    """The states at chunk starts. No CPU kernel gives u: what it is made of stands for it."""
    us.copy_(v * beta[..., None])
    for b, (begin, end) in enumerate(itertools.pairwise(cu.tolist())):
        state = torch.zeros_like(states[:1]) if initial is None else initial[b : b + 1]
        for n, first in enumerate(range(begin, end, 64)):
            states[begin // 64 + b + n] = state[0]
            rows = [x[first : min(first + 64, end)] for x in (q, k, v, g, beta)]
            state = whole(*rows, cu.new_tensor([0, len(rows[0])]), state, scale, l2norm)[1]


class SM90(Kernels):
    """The operators' implementations. `wrong`: (the arguments of `step` by name) -> those that it goes by instead."""

    def __init__(self, wrong=lambda given: given):
        super().__init__()
        self.wrong, self.called = wrong, []

    def decode(self, *args):
        self.called.append("decode")
        super().decode(*args)

    def step(self, *args):
        self.called.append("step")
        names = [argument.name for argument in torch.ops.vexact_native.gated_delta_step.default._schema.arguments]
        super().step(*self.wrong(dict(zip(names, args))).values())

    def chunks(self, *args):
        self.called.append("chunks")
        if args[14] is not None:  # slots
            super().chunks(*args)
            return
        *tensors, scale, l2norm, _, out = args
        assert tensors[10:] == [None] * 7
        self._whole(*tensors[:10], scale, l2norm, out)

    def whole(self, *args):
        self.called.append("whole")
        *tensors, _, scale, l2norm, _, out = args
        self._whole(*tensors, scale, l2norm, out)

    @staticmethod
    def _whole(q, k, v, g, beta, cu, initial, final, states, us, scale, l2norm, out):
        given = q, k, v, g, beta, cu, initial, scale, l2norm
        if out is None:
            assert final is None
            keep_states(*given, states, us)
        else:
            for to, values in zip((out, final), whole(*given)):
                to.copy_(values)

    def backward(self, *args):
        """Begins with the states that were kept, so that they have to be those of the case."""
        from vexact_ops.gated_delta import cpu

        self.called.append("backward")
        dout, dfinal, *rows, cu, states, _, _, _, scale, l2norm, _, _, _ = args[:17]
        grads, initial = args[17:], None
        if grads[-1] is not None:
            initial = torch.zeros_like(grads[-1])
            for b, (begin, end) in enumerate(itertools.pairwise(cu.tolist())):
                if end > begin:
                    initial[b] = states[begin // 64 + b]
        for to, values in zip(grads, cpu.varlen_bwd(dout, dfinal, *rows, cu, initial, scale, l2norm)):
            assert (to is None) == (values is None)
            if to is not None:
                to.copy_(values)


class Canonical:
    """In the places of Triton's."""

    @staticmethod
    def paged_tokens(q, k, v, g, beta, where, count, cu, scale, l2norm, out):
        step = where.slots, where.context_lens, cu
        assert count == len(where.state)
        Kernels._compute((q, k, v, g, beta), where[:4], step, scale, l2norm, out, lambda n: n == 1)

    @staticmethod
    def paged_chunks(q, k, v, g, beta, where, count, cu, scale, l2norm, out, singles):
        step = where.slots[singles:], where.context_lens[singles:], cu[singles:]
        assert count == len(where.state)
        Kernels._compute((q, k, v, g, beta), where[:4], step, scale, l2norm, out, lambda n: n > 1)

    @staticmethod
    def chunks(q, k, v, g, beta, cu, initial, scale, l2norm, final=False, keep=False):
        given = q, k, v, g, beta, cu, initial, scale, l2norm
        if not keep:
            return whole(*given)
        states = torch.full((len(q) // 64 + len(cu), v.shape[1], q.shape[2], v.shape[2]), torch.nan)
        us = torch.empty(v.shape)
        keep_states(*given, states, us)
        return states, us

    @staticmethod
    def backward(*args):
        from vexact_ops.gated_delta import cpu

        *given, kept = args
        assert len(kept) == 2
        return cpu.varlen_bwd(*given)


@pytest.fixture
def stand(tmp_path, monkeypatch):
    """(the kernels of SM90) -> nothing, but that they serve the operators from then on."""
    from vexact_ops.causal_conv import cpu as causal_conv
    from vexact_ops.gated_delta import cpu, cuda, triton, triton_backward

    monkeypatch.setenv("VEXACT_CACHE", str(tmp_path))
    monkeypatch.delenv("VEXACT_ADMIT", raising=False)
    monkeypatch.setattr(admit, "_decisions", {})
    monkeypatch.setattr(cuda.gpu, "multiprocessors", lambda device: 1)
    monkeypatch.setattr(cuda, "delta_gates_fwd", cpu.delta_gates_fwd)
    monkeypatch.setattr(cuda.causal_conv, "paged_fwd", causal_conv.paged_fwd)
    for name in ("paged_tokens", "paged_chunks", "chunks"):
        monkeypatch.setattr(triton, name, getattr(Canonical, name))
    monkeypatch.setattr(triton, "append", lambda *args: None)  # a CPU's kernel has done that
    monkeypatch.setattr(triton_backward, "backward", Canonical.backward)
    with torch.library._scoped_library("vexact_native", "IMPL") as library:

        def serve(kernels):
            for name in ("decode", "step", "chunks", "whole", "backward"):
                library.impl(f"gated_delta_{name}", getattr(kernels, name), "CPU")

        yield serve


def proposal_of(part, crowded=False, sparse=False, few=0):
    from vexact_ops.gated_delta import cuda

    return cuda._decision.__wrapped__(CPU, part, torch.bfloat16, *SIZES, True, few, crowded, sparse)


@pytest.mark.parametrize("blocks", ["few", "crowded", "sparse"])
@pytest.mark.parametrize("part", ["decode", "step", "chunks", "whole", "backward"])
def test_every_part_s_cases_reach_each_of_its_kernels_and_the_race(part, blocks, stand, monkeypatch):
    from vexact_ops.gated_delta import cuda

    kernels = SM90()

    def race_on_gpu(calls):
        for of in calls:
            of[0]()
        return [1.0] * len(calls)

    stand(kernels)
    monkeypatch.setattr(cuda, "race_on_gpu", race_on_gpu)
    proposal = proposal_of(part, blocks != "few", blocks == "sparse")
    decision = admitted(proposal, CPU)
    assert [str(v).split(",")[0] for v in decision.verdicts] == [one.name for one in proposal.candidates], decision.why
    assert set(kernels.called) == ({"whole", "chunks"} if part == "whole" else {part})
    kernels.called.clear()
    everyone = [*proposal.candidates, proposal.canonical]
    assert proposal.race(everyone, proposal.cases()[-1]) == [1.0] * len(everyone)
    assert len(kernels.called) == len(proposal.candidates)


@pytest.mark.parametrize("few", [1, 2, 4, 33])
@pytest.mark.parametrize("part", ["decode", "step"])
def test_few_single_rows_are_tried_and_raced_as_so_many(part, few, stand, monkeypatch):
    from vexact_ops.gated_delta import cuda

    class Small(SM90):
        def decode(self, *args):
            self.by.append((*args[-3:-1], len(args[-1])))
            super().decode(*args)

        def step(self, *args):
            self.by.append((*args[-3:-1], len(args[-1])))
            super().step(*args)

    kernels = Small()
    kernels.by = []

    def race_on_gpu(calls):
        for of in calls:
            of[0]()
        return [3.0, 1.0, 2.0]

    stand(kernels)
    monkeypatch.setattr(cuda, "race_on_gpu", race_on_gpu)
    proposal, (*_, last) = proposal_of(part, few=few), cuda._cases(CPU, part, torch.bfloat16, *SIZES, True, 0, 0, few)
    assert proposal.key.endswith(f" norm T<={few}") and proposal_of(part).key.endswith(" norm")
    decision, ways = admitted(proposal, CPU), [(False, False), (True, False), (True, True)]
    assert [v.us for v in decision.verdicts] == [3.0, 1.0, 2.0], decision
    assert decision.chosen.name == f"sm90 {part} 64 small"
    assert {by[:2] for by in kernels.by} == {*ways} and kernels.by[-3:] == [(*way, few) for way in ways]
    rows, _, (slots, lens, offsets, _), *_ = last
    assert len(rows[0]) == len(slots) == len(lens) == len(offsets) - 1 == few
    assert len({*slots.tolist()}) == few and min(slots) >= 0 and min(lens) > 128, "each goes on from a state of its own"
    assert abs(float((lens - 1 - 128).float().mean()) - 31) < 4
    assert [one.name for one in proposal_of(part).candidates] == [f"sm90 {part} 64"]


@pytest.mark.parametrize("few", [0, 1, 2, 4])
@pytest.mark.parametrize("part", ["decode", "step"])
def test_what_is_shipped_for_single_rows_is_a_candidate(part, few):
    """Of heads of Qwen3-Next and Qwen3.5: what nobody proposes by that name would be raced at every first start."""
    from vexact_ops.gated_delta import cuda

    proposal = cuda._decision.__wrapped__(CPU, part, torch.bfloat16, 16, 32, 128, 128, True, few, False, False)
    shipped = choices._read("nvidia-h200")[choices.KERNELS][proposal.key]
    assert shipped in [one.name for one in proposal.candidates]
    assert ("small" in shipped) == (0 < few < (5 if part == "decode" else 4)), "as measured"


@pytest.mark.parametrize("hv,dv", [(2, 64), (3, 64), (2, 320)])
def test_whole_steps_are_asked_for_where_the_operator_takes_them(hv, dv, monkeypatch):
    from vexact_ops.gated_delta import cuda

    asked = []
    monkeypatch.setattr(cuda, "_decision", lambda device, part, *of: asked.append(part))
    monkeypatch.setattr(cuda.gpu, "not_sm90", lambda device: None)
    monkeypatch.setattr(cuda.gpu, "multiprocessors", lambda device: 132)
    found = cuda.admit(1, hv, 128, dv, torch.bfloat16, "cpu")
    assert ("step" in asked) == ((hv, dv) == (2, 64))
    assert ("decode" in asked) == (dv == 64)
    assert all(not decision.verdicts for decision in found if decision)


WRONG = {
    "nothing": lambda given: given,
    "no bias": lambda given: given | {"bias": None},
    "beta is never doubled": lambda given: given | {"doubled": False},
    "the ring is not written": lambda given: given | {"taps": given["taps"].clone()},
    "the oldest input is lost": lambda given: given | {"weight": given["weight"] * torch.tensor([0, 1, 1, 1])},
    "what is before the ring counts": lambda given: given | {"context_lens": given["context_lens"].clamp(min=4)},
    "gates' vectors in bf16": lambda given: given | {"a_log": given["a_log"].bfloat16()},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_kernel_of_whole_steps_that_leaves_something_out_is_refused(wrong, stand):
    stand(SM90(WRONG[wrong]))
    decision = admitted(proposal_of("step"), CPU)
    (verdict,) = decision.verdicts
    assert verdict.error is None and verdict.admitted == (wrong == "nothing"), decision
