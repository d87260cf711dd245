"""handle.logprobs and scores: the numbers of the logits, of any rows, at any temperatures, where they are wanted."""

import pytest
import torch
from conftest import devices
from families import alone, family, pack, pad, sequences, tiny
from torch.utils._python_dispatch import TorchDispatchMode

import vexact_ops as vx
from vexact_ops.testing import assert_bitwise

KINDS = pytest.mark.parametrize("device,dtype", devices())


@pytest.mark.parametrize("name", [family(n) for n in ("llama", "gemma2", "granite")])
@KINDS
def test_logprobs_are_those_of_the_logits(name, device, dtype):
    model, seqs, none = tiny(name, dtype, device=device), sequences(device=device), torch.zeros(1, device=device)
    with vx.patch.hf(model) as handle:
        expected, entropy = [], []
        for s, logits in zip(seqs, alone(model, seqs)):
            logp = vx.log_softmax(logits / torch.full_like(logits, 0.7))  # by a number, a GPU multiplies by 1 / 0.7
            next_ = torch.cat((s[1:], s[:1]))
            expected.append(torch.cat((logp.gather(1, next_[:, None])[:-1, 0], none)))
            entropy.append(torch.cat((-(logp.exp() * logp).sum(-1)[:-1], none)))
        got = [handle.logprobs(s, temperature=0.7) for s in seqs]
        assert_bitwise(got, expected, "alone")
        ids, cu, positions = pack(seqs)
        assert_bitwise(handle.logprobs(ids, cu_seqlens=cu, temperature=0.7)[0], torch.cat(expected), "cu_seqlens")
        assert_bitwise(handle.logprobs(ids[0], cu_seqlens=cu, temperature=0.7), torch.cat(expected), "one dimension")
        here = handle.logprobs(ids, cu_seqlens=cu.cpu(), temperature=0.7)  # where nobody waits for a GPU
        assert_bitwise(here[0], torch.cat(expected), "cu_seqlens on the CPU")
        assert_bitwise(
            handle.logprobs(ids, position_ids=positions, temperature=0.7)[0], torch.cat(expected), "positions"
        )
        for side in ("left", "right"):
            ids, mask = pad(seqs, side)
            both = handle.logprobs(ids, attention_mask=mask, temperature=0.7, return_entropy=True)
            for i in range(len(seqs)):
                assert_bitwise(both[0][i][mask[i].bool()], expected[i], f"{side} padding")
                torch.testing.assert_close(both[1][i][mask[i].bool()], entropy[i], rtol=1e-5, atol=1e-5)
            assert not both[0][mask == 0].any()
        hidden = handle._patch.base(seqs[0][None], use_cache=False).last_hidden_state
        assert_bitwise(handle.logits(hidden)[0], alone(model, seqs)[0], "logits of hidden states")
        for options in ({"temperature": 0.7}, {"top_k": torch.full((len(hidden[0]),), 3, device=device)}):
            drawn = vx.sample(handle.logits(hidden[0]), 5, 9, **options)
            assert_bitwise(handle.sample(hidden[0], 5, 9, **options), drawn, "draws from hidden states")


@pytest.mark.parametrize("name", [family(n) for n in ("qwen3", "gemma2")])
@KINDS
def test_log_probabilities_where_they_are_wanted(name, device, dtype):
    """No others, and the same bits and gradients, in every form of a batch."""
    model, seqs = tiny(name, dtype, device=device), sequences(device=device)
    (ids, cu, positions), (padded, mask) = pack(seqs), pad(seqs, "left")
    forms = {
        "cu_seqlens": (ids, {"cu_seqlens": cu}),
        "cu_seqlens on the CPU": (ids[0], {"cu_seqlens": cu.cpu()}),
        "positions": (ids, {"position_ids": positions}),
        "padding": (padded, {"attention_mask": mask}),
    }
    with vx.patch.hf(model) as handle:
        for form, (given, options) in forms.items():
            options |= {"temperature": 0.7, "return_entropy": True}
            every = handle.logprobs(given, **options)
            for where in (torch.arange(given.numel()) % 3 == 1, torch.zeros(given.numel(), dtype=torch.bool)):
                where = where.view(given.shape).to("cpu" if "CPU" in form else device)
                got, here = handle.logprobs(given, where=where, **options), where.to(device)
                assert_bitwise(got, [torch.where(here, v, 0) for v in every], form)
        weights = dict(model.named_parameters())
        here = torch.arange(ids.numel(), device=device)[None] % 2 == 0
        loss = handle.logprobs(ids, cu_seqlens=cu, where=here).sum(), handle.logprobs(ids, cu_seqlens=cu)[here].sum()
        assert_bitwise(*(torch.autograd.grad(each, tuple(weights.values())) for each in loss), "gradients")
        with pytest.raises(TypeError, match=r"^logprobs: where: got dtype torch.int64, expected a mask, bool"):
            handle.logprobs(ids, where=ids)
        with pytest.raises(ValueError, match=r"^logprobs: where: got shape \(\d+,\), expected \(1, \d+\)"):
            handle.logprobs(ids, where=here[0])


@pytest.mark.parametrize("name", [family(n) for n in ("qwen3", "gemma2")])
@KINDS
def test_a_temperature_for_each_token(name, device, dtype):
    model = tiny(name, dtype, device=device)
    ids, cu, _ = pack(sequences(device=device))
    temperatures = torch.linspace(0.5, 1.7, ids.shape[1], device=device)[None]
    with vx.patch.hf(model) as handle:
        got, entropy = handle.logprobs(ids, cu_seqlens=cu, temperature=temperatures, return_entropy=True)
        for at, temperature in enumerate(temperatures[0].tolist()):
            one = handle.logprobs(ids, cu_seqlens=cu, temperature=temperature, return_entropy=True)
            assert_bitwise([got[0, at], entropy[0, at]], [one[0][0, at], one[1][0, at]], f"token {at}")
        for value, where in ((temperatures[0], "one dimension"), (temperatures[:, 1:], "too few")):
            with pytest.raises(ValueError, match="logprobs: temperature: got shape"):
                handle.logprobs(ids, cu_seqlens=cu, temperature=value)
                pytest.fail(where)


@pytest.mark.parametrize("name", [family(n) for n in ("hyperclovax", "granite")])
def test_one_name_divides_the_logits_of_a_family_and_multiplies_those_of_another(name):
    model, ids = tiny(name, logits_scaling=0.125), sequences((9,))[0][None]
    stock = model(ids).logits
    with vx.patch.hf(model) as handle:
        torch.testing.assert_close(model(ids).logits, stock, rtol=1e-4, atol=1e-4)
        assert handle.describe().head.scale == {"hyperclovax": 8.0, "granite": 0.125}[name]


@pytest.mark.parametrize("name", [family(n) for n in ("llama", "granite")])
@KINDS
def test_scores_instead_of_logits(name, device, dtype):
    """What a trainer that wraps the model asks of its forward: of any rows, any tokens."""
    model = tiny(name, dtype, device=device)
    ids, cu, _ = pack(sequences(device=device))
    target, rows = ids[0].flip(0), torch.tensor([4, 0, 18], device=device)
    with vx.patch.hf(model):
        every = vx.log_softmax(model(ids, cu_seq_lens_q=cu, use_cache=False).logits[0])
        expected = every.gather(1, target[:, None])[:, 0]
        score = vx.patch.Score(target)
        assert_bitwise(model(ids, cu_seq_lens_q=cu, use_cache=False, vexact_score=score), (expected,))
        score = vx.patch.Score(target[rows], rows, return_entropy=True)
        got, entropy = model(ids, cu_seq_lens_q=cu, use_cache=False, vexact_score=score)
        assert_bitwise(got, expected[rows])
        torch.testing.assert_close(entropy, -(every.exp() * every).sum(-1)[rows], rtol=1e-5, atol=1e-5)
        with pytest.raises(TypeError, match=r"vexact_score: got Tensor, expected a vexact_ops\.patch\.Score"):
            model(ids, cu_seq_lens_q=cu, use_cache=False, vexact_score=target)


def test_positions_that_no_engine_has_are_refused():
    """They would be computed with: log-probabilities that differ from the engine's in their last bits, and no error."""
    model, seqs = tiny("llama"), sequences((3, 4, 5))
    (ids, cu, positions), (padded, mask) = pack(seqs), pad(seqs, "left")
    every = torch.arange(ids.shape[1])[None]
    with vx.patch.hf(model) as handle:
        expected = handle.logprobs(ids, cu_seqlens=cu)
        assert_bitwise(handle.logprobs(ids, cu_seqlens=cu, position_ids=positions), expected)
        counted = (mask.cumsum(1) - 1).clamp(min=0)
        rows = handle.logprobs(padded, attention_mask=mask, position_ids=counted)[mask.bool()]
        assert_bitwise(rows, expected[0])
        filled = torch.cat((ids, torch.zeros(1, 3, dtype=ids.dtype)), 1)
        zeros = torch.cat((positions, torch.zeros(1, 3, dtype=ids.dtype)), 1)
        ends = torch.cat((cu, cu[-1:] + 3))
        assert_bitwise(handle.logprobs(filled, cu_seqlens=ends, position_ids=zeros)[:, :-3], expected)
        for others in (every, positions + 1):
            with pytest.raises(ValueError, match="position_ids: got others than 0, 1, 2"):
                handle.logprobs(ids, cu_seqlens=cu, position_ids=others)
        for fewer in (cu[[0, 2, 3]], torch.cat((cu[:1], cu[:1] + 2, cu[1:]))):
            with pytest.raises(ValueError, match="position_ids: got others than 0, 1, 2"):
                handle.logprobs(ids, cu_seqlens=fewer, position_ids=positions)
        with pytest.raises(ValueError, match="position_ids: got a sequence that begins at 1, expected 0"):
            handle.logprobs(ids, position_ids=positions + 1)
        with pytest.raises(ValueError, match="position_ids: got a sequence that begins at 2, expected 0"):
            handle.logprobs(padded, attention_mask=mask, position_ids=torch.arange(5).expand(3, 5))


def test_positions_that_no_engine_has_are_refused_of_a_score_too():
    """As a trainer asks that wraps the model."""
    model, seqs = tiny("llama"), sequences((3, 4, 5))
    (ids, cu, positions), (padded, mask) = pack(seqs), pad(seqs, "left")
    row, rows = vx.patch.Score(ids[0].roll(-1)), vx.patch.Score(padded.flatten().roll(-1))
    with vx.patch.hf(model):
        (expected,) = model(ids, cu_seq_lens_q=cu, use_cache=False, vexact_score=row)
        for how in ({"cu_seq_lens_q": cu, "position_ids": positions}, {"position_ids": positions}):
            assert_bitwise(model(ids, use_cache=False, vexact_score=row, **how), (expected,))
        counted = (mask.cumsum(1) - 1).clamp(min=0)
        for how in ({}, {"position_ids": counted}):
            model(padded, attention_mask=mask, use_cache=False, vexact_score=rows, **how)
        for others in (torch.arange(12)[None], positions + 1):
            with pytest.raises(ValueError, match="vexact_score: position_ids: got others than 0, 1, 2"):
                model(ids, cu_seq_lens_q=cu, position_ids=others, use_cache=False, vexact_score=row)
        with pytest.raises(ValueError, match="vexact_score: position_ids: got a sequence that begins at 1, expected 0"):
            model(ids, position_ids=positions + 1, use_cache=False, vexact_score=row)
        with pytest.raises(ValueError, match="vexact_score: position_ids: got a sequence that begins at 2, expected 0"):
            model(padded, attention_mask=mask, position_ids=torch.arange(5)[None], use_cache=False, vexact_score=rows)
        model.config.output_attentions = True  # nobody would have them
        assert_bitwise(model(ids, cu_seq_lens_q=cu, use_cache=False, vexact_score=row), (expected,))


@pytest.mark.parametrize("more", [{"labels": 1}, {"logits_to_keep": 2}, {"skip_logits": True}], ids=str)
def test_what_says_otherwise_what_is_wanted_is_refused_beside_a_score(more):
    """It would be passed over, and the caller would take rows for others."""
    model, ids = tiny("llama"), sequences((5,))[0][None]
    more = {name: ids if name == "labels" else value for name, value in more.items()}
    with vx.patch.hf(model), pytest.raises(ValueError, match=f"vexact_score: got {next(iter(more))} beside it"):
        model(ids, vexact_score=vx.patch.Score(ids[0]), **more)


class _Reads(TorchDispatchMode):
    """What is done, in its order: an answer that the host reads, or a forward's op."""

    def __init__(self):
        super().__init__()
        self.done = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default and args[0].dtype == torch.bool:
            self.done.append("read")
        elif func.namespace.startswith("vexact"):
            self.done.append("op")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("axes", [None, 3], ids=["one axis", "three axes"])
def test_positions_are_read_once_the_device_has_the_forward(axes):
    """A GPU would have nothing to do while the host waits for its answer."""
    model = tiny("llama")
    ids, cu, positions = pack(sequences((3, 4, 5)))
    positions = positions if axes is None else positions.expand(axes, *positions.shape)
    with vx.patch.hf(model) as handle:
        with _Reads() as seen:
            handle.logprobs(ids, cu_seqlens=cu, position_ids=positions)
        assert seen.done.count("op") > 2 and "read" in seen.done
        assert "op" not in seen.done[seen.done.index("read") :]
        with pytest.raises(ValueError, match="position_ids: got others than 0, 1, 2"):
            handle.logprobs(ids, cu_seqlens=cu, position_ids=positions + 1)
        if axes:
            with pytest.raises(ValueError, match="position_ids: got other positions on one axis than on another"):
                handle.logprobs(ids, cu_seqlens=cu, position_ids=torch.cat((positions[:2], positions[:1] + 1)))


@pytest.mark.parametrize("device,dtype", [pytest.param("cuda", torch.bfloat16, marks=pytest.mark.cuda)])
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible to torch")
def test_positions_on_a_gpu_are_not_waited_for(device, dtype):
    model = tiny("llama", dtype, device=device)
    ids, cu, positions = pack(sequences((3, 4, 5), device=device))
    with vx.patch.hf(model) as handle:
        expected = handle.logprobs(ids, cu_seqlens=cu)  # compiles and verifies kernels, which wait
        with pytest.raises(ValueError, match="position_ids: got others than 0, 1, 2"):
            handle.logprobs(ids, cu_seqlens=cu.cpu(), position_ids=positions + 1)
        here = cu.cpu()
        torch.cuda.set_sync_debug_mode("error")
        try:
            got = handle.logprobs(ids, cu_seqlens=here, position_ids=positions)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert_bitwise(got, expected)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_mask_of_other_numbers_is_refused(side):
    """What is added to scores has 0 at tokens; and numbers that count the sequences of a row would make one of them."""
    model = tiny("llama")
    ids, mask = pad(sequences((3, 5)), side)
    added = torch.where(mask.bool(), 0.0, torch.finfo(torch.float32).min)
    with vx.patch.hf(model) as handle:
        expected = handle.logprobs(ids, attention_mask=mask)
        for dtype in (torch.bool, torch.uint8, torch.bfloat16):
            assert_bitwise(handle.logprobs(ids, attention_mask=mask.to(dtype)), expected)
        for other in (added, mask * torch.tensor([[1], [2]]), -mask, mask * float("nan")):
            with pytest.raises(ValueError, match="attention_mask: got numbers besides 0 and 1"):
                handle.logprobs(ids, attention_mask=other)
