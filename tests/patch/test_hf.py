"""patch.hf: a sequence has the same bits however its batch is made, and they are the right ones."""

import contextlib
import copy

import pytest
import torch
from conftest import devices
from families import (
    FORMS,
    FURTHER,
    NAMED,
    Pages,
    alone,
    check_forms,
    family,
    gradients,
    in_chunks,
    in_padded_batch,
    pack,
    pad,
    sequences,
    tiny,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import DynamicCache, GenerationConfig

import vexact_ops as vx
from vexact_ops.patch.batch import positions_of
from vexact_ops.testing import assert_bitwise, check_repeatable

KINDS = pytest.mark.parametrize("device,dtype", devices())
BF16 = pytest.mark.parametrize("device,dtype", devices(torch.bfloat16))


# the promise


@pytest.mark.parametrize("name", [family(n) for n in NAMED])
@KINDS
def test_a_sequence_has_the_same_logits_in_every_form(name, device, dtype):
    model = tiny(name, dtype, device=device)
    with vx.patch.hf(model):
        check_forms(model, sequences(device=device))


@pytest.mark.parametrize("device,dtype", [kind for kind in devices() if kind.values[0] == "cuda"])
def test_heads_wide_enough_for_fast_kernels(device, dtype):
    """Heads of 64 take other kernels than those of 16 there; some of them only for many tokens."""
    model = tiny("qwen3", dtype, device=device, head_dim=64, max_position_embeddings=4096)
    with vx.patch.hf(model) as handle:
        check_forms(model, sequences((60, 1, 33), device=device))
        many = sequences((1500, 150, 900), device=device)
        ids, cu, _ = pack(many)
        whole = handle.logprobs(ids[0], cu_seqlens=cu).split([len(s) for s in many])
        assert_bitwise(list(whole), [handle.logprobs(s) for s in many], "beyond 2,048 tokens")
        assert_bitwise(long_pages(model, many[1:2]), alone(model, many[1:2]), "in pages")


@BF16
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    name=st.sampled_from(["qwen3", "gemma2"]),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=8)
def test_any_lengths(device, dtype, lengths, name, seed):
    model = patched(name, device)
    check_forms(
        model,
        sequences(lengths, seed, device=device),
        {n: FORMS[n] for n in ("left padded", "packed by lengths", "paged")},
    )


_PATCHED = {}


def patched(name, device):
    if (name, device) not in _PATCHED:
        _PATCHED[name, device] = tiny(name, torch.bfloat16, device=device)
        vx.patch.hf(_PATCHED[name, device])
    return _PATCHED[name, device]


@pytest.mark.parametrize("broken", ["linear", "rmsnorm", "attention_varlen", "rope_cos_sin"])
def test_an_op_that_sees_the_batch_is_caught(broken, monkeypatch):
    stock = getattr(vx, broken)

    def by_size(x, *args, **kwargs):  # another rounding for large batches
        out = stock(x, *args, **kwargs)
        if x.shape[0] * (x.shape[1] if x.dim() == 3 and broken != "attention_varlen" else 1) > 12:
            scale = 1 + 2**-7
            out = tuple(t * scale for t in out) if isinstance(out, tuple) else out * scale
        return out

    monkeypatch.setattr(vx, broken, by_size)
    model = tiny("llama", torch.bfloat16)
    with vx.patch.hf(model), pytest.raises(AssertionError, match="differ"):
        check_forms(model, sequences())


def test_the_stock_model_is_caught():
    """In fp32 the library that multiplies matrices takes another order for another number of rows."""
    model = tiny("llama", hidden_size=256, intermediate_size=1024)
    seqs = sequences((40, 1, 30))
    with pytest.raises(AssertionError, match="differ"), torch.no_grad():
        assert_bitwise(in_padded_batch(model, seqs, "right"), alone(model, seqs))
    with vx.patch.hf(model), torch.no_grad():
        assert_bitwise(in_padded_batch(model, seqs, "right"), alone(model, seqs))


@pytest.mark.parametrize("name", [family(n) for n in ("llama", "gemma2")])
@KINDS
def test_gradients_of_the_inputs_have_the_same_bits(name, device, dtype):
    model = tiny(name, dtype, device=device).train()
    seqs = sequences(device=device)
    g = torch.Generator().manual_seed(5)
    dys = [torch.randn(len(s), 61, generator=g).to(device) for s in seqs]
    embed = model.get_input_embeddings()

    def grads(ids, logits_of, **how):
        x = embed(ids).detach().requires_grad_()
        logits = model(inputs_embeds=x, use_cache=False, **how).logits
        outputs = logits_of(logits)
        return torch.autograd.grad(outputs, x, dys if len(outputs) > 1 else None)[0]

    with vx.patch.hf(model):
        expected = []
        for s, dy in zip(seqs, dys):
            x = embed(s[None]).detach().requires_grad_()
            expected.append(torch.autograd.grad(model(inputs_embeds=x, use_cache=False).logits[0], x, dy)[0][0])
        ids, mask = pad(seqs, "left")
        dx = grads(ids, lambda y: [y[i][mask[i].bool()] for i in range(3)], attention_mask=mask)
        assert_bitwise([dx[i][mask[i].bool()] for i in range(3)], expected, "left padded")
        ids, cu, _ = pack(seqs)
        dx = grads(ids, lambda y: y[0].split([len(s) for s in seqs]), cu_seq_lens_q=cu)
        assert_bitwise(list(dx[0].split([len(s) for s in seqs])), expected, "packed")


@KINDS
def test_repeatable_with_other_threads_and_instruction_sets(device, dtype):
    model = tiny("gemma2", dtype, device=device).train()
    ids, cu, _ = pack(sequences(device=device))
    with vx.patch.hf(model) as handle:

        def run():
            logprobs = handle.logprobs(ids, cu_seqlens=cu, temperature=0.7)
            return logprobs, *gradients(model, logprobs.sum(), None).values()

        check_repeatable(run, threads=(1, 2))


@KINDS
def test_kv_segment_is_one_more_declared_order(device, dtype):
    model, seqs = tiny("qwen3", dtype, device=device), sequences((150, 70), device=device)
    with vx.patch.hf(model) as handle:
        whole = handle.logprobs(seqs[0])
    with vx.patch.hf(model, kv_segment=64 if device == "cpu" else 128) as handle:  # attention's own blocks of keys
        forms = {name: FORMS[name] for name in ("left padded", "packed by lengths")}
        check_forms(model, seqs, {**forms, "paged": lambda m, s: long_pages(m, s)})
        cut = handle.logprobs(seqs[0])
    if dtype == torch.float32:  # in bf16 the change seldom survives the rounding
        assert (whole != cut).any()
    torch.testing.assert_close(cut, whole, rtol=0, atol=1e-4 if dtype == torch.float32 else 0.3)


def long_pages(model, seqs):
    pages = Pages(model, len(seqs), 8, model.dtype, per_sequence=20)
    out = [[] for _ in seqs]
    with torch.no_grad():
        for at in range(0, max(len(s) for s in seqs), 40):
            work = [(i, s[at : at + 40]) for i, s in enumerate(seqs) if at < len(s)]
            for (i, _), rows in zip(work, pages.step(model, work).split([len(t) for _, t in work])):
                out[i].append(rows)
    return [torch.cat(rows) for rows in out]


@KINDS
def test_a_window_that_forgets_keys_keeps_the_blocks_of_those_it_has(device, dtype):
    """Attention cuts keys into blocks from the start of the sequence; a window's cache no longer has that start."""
    model, seqs = tiny("mistral", dtype, device=device, sliding_window=90), sequences((160,), device=device)
    with vx.patch.hf(model):
        check_forms(model, seqs, {"in chunks": lambda m, s: in_chunks(m, s, most=40)})


# generation


@pytest.mark.parametrize("name", [family(n) for n in ("llama", "mistral", "gemma2")])
@BF16
def test_generate_agrees_with_the_training_forward(name, device, dtype):
    model, seqs = tiny(name, dtype, device=device), sequences((6, 1, 3), device=device)
    ids, mask = pad(seqs, "left")
    greedy = GenerationConfig(max_new_tokens=9, do_sample=False, pad_token_id=0, eos_token_id=None)
    how = {"generation_config": greedy, "return_dict_in_generate": True, "output_logits": True}
    with vx.patch.hf(model) as handle:
        batch = model.generate(ids, attention_mask=mask, **how)
        new = batch.sequences[:, ids.shape[1] :]
        for i, s in enumerate(seqs):
            single = model.generate(s[None], attention_mask=torch.ones_like(s[None]), **how)
            assert single.sequences[0, len(s) :].tolist() == new[i].tolist()
            whole = torch.cat((s, new[i]))
            forward = model(whole[None], use_cache=False).logits[0, len(s) - 1 : -1]
            assert_bitwise(torch.stack([step[i] for step in batch.logits]), forward, "generate in a batch")
            assert_bitwise(torch.stack([step[0] for step in single.logits]), forward, "generate alone")
            rolled = torch.stack([vx.log_softmax(step[i])[t] for step, t in zip(batch.logits, new[i])])
            assert_bitwise(handle.logprobs(whole)[len(s) - 1 : -1], rolled, "log-probabilities")


# log-probabilities and the loss


@pytest.mark.parametrize("name", [family(n) for n in ("llama", "gemma2", "granite")])
@pytest.mark.parametrize("device,dtype", devices(torch.float32))
def test_loss(name, device, dtype):
    model = tiny(name, dtype, device=device)
    ids, mask = pad(sequences(device=device), "right")
    labels = ids.masked_fill(mask == 0, -100)
    stock = model(ids, attention_mask=mask, labels=labels).loss
    items = model(ids, attention_mask=mask, labels=labels, num_items_in_batch=torch.tensor(7)).loss
    with vx.patch.hf(model) as handle:
        out = model(ids, attention_mask=mask, labels=labels)
        torch.testing.assert_close(out.loss, stock, rtol=1e-5, atol=0)
        lean = model(ids, attention_mask=mask, labels=labels, skip_logits=True)
        assert lean.logits is None and out.logits.shape == (3, ids.shape[1], 61)
        assert_bitwise(lean.loss, out.loss)
        got = model(ids, attention_mask=mask, labels=labels, num_items_in_batch=torch.tensor(7)).loss
        torch.testing.assert_close(got, items, rtol=1e-5, atol=0)
        values = handle.logprobs(ids, attention_mask=mask)
        torch.testing.assert_close(out.loss, -values.sum() / (values != 0).sum(), rtol=1e-5, atol=0)
        by_hand = model.loss_function(logits=out.logits, labels=labels, vocab_size=61)
        torch.testing.assert_close(by_hand, out.loss, rtol=1e-5, atol=0)
        as_tuple = model(ids, attention_mask=mask, labels=labels, return_dict=False)
        assert_bitwise(as_tuple[:2], (out.loss, out.logits))
    assert_bitwise(model(ids, attention_mask=mask, labels=labels).loss, stock, "stock again")


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_loss_of_what_comes_out_at_padding_is_refused(side):
    """It would depend on how a row is padded: with -100 there it is that of the rows alone."""
    model, seqs = tiny("llama"), sequences((7, 3))
    ids, mask = pad(seqs, side, 9)
    labels = ids.masked_fill(mask == 0, -100)
    if side == "left":
        at = mask.argmax(1)
        wrong = [(labels, r"got 2 of tokens .* row 0 at token 1\), expected -100: also")]
        labels = labels.index_put((torch.arange(2), at), torch.tensor(-100))
        wrong += [(labels.masked_fill(mask == 0, 5), r"got 6 of tokens .* row 0 at token 0\)")]
    else:
        wrong = [(labels.index_put((torch.tensor(1), torch.tensor(4)), ids[1, 4]), r"got 1 of .* row 1 at token 3\)")]
        labels[1, 3] = 7  # which the last token predicts: the end of a text, say, that rows are padded with
    with vx.patch.hf(model), torch.no_grad():
        got = model(ids, attention_mask=mask, labels=labels).loss
        for others, words in wrong:
            with pytest.raises(ValueError, match=f"^labels: {words}"):
                model(ids, attention_mask=mask, labels=others)
            shifted = torch.nn.functional.pad(others, (0, 1), value=-100)[:, 1:]
            with pytest.raises(ValueError, match=f"^labels: {words}"):
                model(ids, attention_mask=mask, labels=others, shift_labels=shifted)
            zeros = others.masked_fill(others == -100, 0)
            with pytest.raises(ValueError, match=r"^labels: .* expected 0: also"):
                model(ids, attention_mask=mask, labels=zeros, ignore_index=0)
        with pytest.raises(ValueError, match=r"^labels: got 2 of tokens"):
            kept = torch.tensor([0 if side == "left" else 7, 8])
            model(ids, attention_mask=mask, labels=torch.full((2, 2), 5), logits_to_keep=kept)
        alone = [model(ids[i][mask[i] != 0][None]).logits[0] for i in range(2)]
        rows = [labels[i, 1:][mask[i, :-1] != 0] for i in range(2)]
        logits = torch.cat([x[: len(t)] for x, t in zip(alone, rows)])
        torch.testing.assert_close(got, torch.nn.functional.cross_entropy(logits, torch.cat(rows)), rtol=1e-6, atol=0)


# accuracy


def logits_and_gradients(model, seqs, dys):
    logits = alone(model, seqs)
    grads = gradients(model, logits, [dy.to(logits[0].dtype) for dy in dys])
    return torch.cat(logits).detach(), grads


def check_accuracy(model, seqs, **options):
    """Against the stock model in float64: errors at most those of the stock model in the same dtype, with some slack
    for luck on so few numbers."""
    g = torch.Generator().manual_seed(3)
    dys = [torch.randn(len(s), 61, generator=g).to(model.device) for s in seqs]
    logits, grads = logits_and_gradients(model, seqs, dys)
    exact_logits, exact = logits_and_gradients(copy.deepcopy(model).double(), seqs, dys)
    with vx.patch.hf(model, **options):
        our_logits, ours = logits_and_gradients(model, seqs, dys)
    floor = {torch.float32: 3e-7, torch.float16: 3e-4}.get(model.dtype, 1e-3)

    def error(got, want):
        return ((got.double() - want).norm() / want.norm().clamp(min=1e-12)).item()

    assert our_logits.dtype == torch.float32
    assert error(our_logits, exact_logits) <= 1.5 * error(logits, exact_logits) + floor
    whole = [torch.cat([g[n].double().flatten() for n in exact]) for g in (ours, grads, exact)]
    assert error(whole[0], whole[2]) <= 1.5 * error(whole[1], whole[2]) + floor
    for n in exact:
        limit = 3 * error(grads[n], exact[n]) + 10 * floor
        assert error(ours[n], exact[n]) <= limit, f"{n}: {error(ours[n], exact[n]):.3g} above {limit:.3g}"


@pytest.mark.parametrize("name", [family(n) for n in NAMED])
@KINDS
def test_accuracy_of_logits_and_of_every_gradient(name, device, dtype):
    check_accuracy(tiny(name, dtype, device=device).train(), sequences((11, 3), device=device))


@pytest.mark.parametrize("name", [family(n) for n in FURTHER])
@BF16
def test_further_families(name, device, dtype):
    model = tiny(name, dtype, device=device)
    check_accuracy(model, sequences((9,), device=device))
    with vx.patch.hf(model):
        check_forms(
            model,
            sequences((6, 1), device=device),
            {n: FORMS[n] for n in ("left padded", "packed by positions", "paged")},
        )


# the forward's arguments


def test_positions_follow_the_mask_and_may_be_given():
    model, seqs = tiny("llama"), sequences()
    ids, mask = pad(seqs, "left")
    with vx.patch.hf(model):
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        given_ = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
        assert_bitwise(model(ids, attention_mask=mask, use_cache=False).logits[mask.bool()], given_[mask.bool()])
        shifted = model(seqs[0][None], position_ids=torch.arange(5, 5 + len(seqs[0]))[None], use_cache=False).logits
        assert (shifted != alone(model, seqs)[0]).any()


def test_several_rows_may_be_packed():
    model, seqs = tiny("mistral"), sequences((3, 4, 5, 2))
    ids = torch.stack((torch.cat(seqs[:2]), torch.cat(seqs[2:])))
    positions = torch.stack([torch.cat([torch.arange(len(s)) for s in part]) for part in (seqs[:2], seqs[2:])])
    with vx.patch.hf(model) as handle:
        logits = model(ids, position_ids=positions, use_cache=False).logits
        assert_bitwise(list(logits.flatten(0, 1).split([3, 4, 5, 2])), alone(model, seqs))
        got = handle.logprobs(ids, position_ids=positions)
        assert_bitwise(got.flatten(), torch.cat([handle.logprobs(s) for s in seqs]))


@pytest.mark.parametrize("keep", [3, torch.tensor([6, 1, 4]), torch.arange(7).flip(0)], ids=["last", "some", "turned"])
def test_a_loss_of_the_logits_that_are_kept(keep):
    """Labels may be as many as those are: of the rows that logits are of, in their order."""
    model, ids = tiny("llama"), sequences((7,))[0][None]
    labels = ids[:, -keep:] if isinstance(keep, int) else ids[:, keep]
    for more in ({}, {"shift_labels": labels.roll(-1, 1)}):
        stock = model(ids, labels=labels, logits_to_keep=keep, **more).loss
        with vx.patch.hf(model):
            out = model(ids, labels=labels, logits_to_keep=keep, **more)
            torch.testing.assert_close(out.loss, stock, rtol=1e-5, atol=0)
            lean = model(ids, labels=labels, logits_to_keep=keep, skip_logits=True, **more)
            assert_bitwise(lean.loss, out.loss)


def test_logits_to_keep_and_a_decoder_alone():
    model, seqs = tiny("qwen2"), sequences()
    with vx.patch.hf(model):
        full = alone(model, seqs)[0]
        assert_bitwise(model(seqs[0][None], logits_to_keep=2).logits[0], full[-2:])
        assert_bitwise(model(seqs[0][None], logits_to_keep=torch.tensor([3, 0])).logits[0], full[[3, 0]])
        out = model(seqs[0][None], output_hidden_states=True)
        assert len(out.hidden_states) == 3
        hidden = model.model(seqs[0][None]).last_hidden_state
        assert_bitwise(out.hidden_states[-1], hidden)
        with torch.inference_mode():
            assert_bitwise(alone(model, seqs)[0], full, "inference mode")
    decoder = model.model
    with vx.patch.hf(decoder) as handle:
        assert_bitwise(decoder(seqs[0][None]).last_hidden_state, hidden)
        with pytest.raises(ValueError, match="Qwen2Model has no output layer"):
            handle.logprobs(seqs[0])


def test_bad_batches_are_named():
    model, seqs = tiny("llama"), sequences()
    ids, mask = pad(seqs, "left")
    row, cu, positions = pack(seqs)
    with vx.patch.hf(model) as handle:
        hole = mask.clone()
        hole[2, 5] = 0
        with pytest.raises(ValueError, match="attention_mask: a row has a hole"):
            model(ids, attention_mask=hole)
        with pytest.raises(ValueError, match=r"attention_mask: got \(3, 10\), expected padding of shape \(3, 11\)"):
            model(ids, attention_mask=mask[:, 1:])
        with pytest.raises(ValueError, match=r"attention_mask: got \(3, 1, 11, 11\)"):
            model(ids, attention_mask=torch.ones(3, 1, 11, 11))
        with pytest.raises(ValueError, match="position_ids: they jump inside a row of attention_mask"):
            model(row, attention_mask=torch.ones_like(row), position_ids=positions)
        with pytest.raises(ValueError, match="use_cache: got a cache with position_ids that restart"):
            model(row, position_ids=positions, use_cache=True)
        with pytest.raises(ValueError, match="use_cache: got a cache with cu_seq_lens_q"):
            model(row, cu_seq_lens_q=cu, past_key_values=DynamicCache())
        with pytest.raises(ValueError, match="cu_seq_lens_k: got other lengths"):
            model(row, cu_seq_lens_q=cu, cu_seq_lens_k=cu[:-1])
        for wrong in (cu + 1, cu[:-1], cu[1:], cu.flip(0), cu * 2, cu[:0]):
            with pytest.raises(ValueError, match=r"^cu_seq_lens_q: got"):
                model(row, cu_seq_lens_q=wrong, use_cache=False)
            with pytest.raises(ValueError, match=r"^logprobs: cu_seqlens: got"):
                handle.logprobs(row, cu_seqlens=wrong)
        for wrong in (cu.float(), cu[None]):
            with pytest.raises(ValueError, match=r"expected \(N \+ 1,\) int32 or int64"):
                handle.logprobs(row, cu_seqlens=wrong)
        for wrong, error in (([5, 6], TypeError), (row.float(), TypeError), (row[:, :0], ValueError)):
            with pytest.raises(error, match=r"^logprobs: input_ids: got"):
                handle.logprobs(wrong)
        with pytest.raises(TypeError, match=r"^logprobs: cu_seqlens: got a list"):
            handle.logprobs(row, cu_seqlens=cu.tolist())
        with pytest.raises(ValueError, match="vexact_paged: expected one row"):
            model(row, vexact_paged=object())
        with pytest.raises(ValueError, match=r"position_ids: got shape \(1, 3\)"):
            model(ids, position_ids=positions[:, :3])
        for wrong in (positions[:, :11].expand(2, -1), positions[:, :11].expand(5, -1)):  # of three rows
            with pytest.raises(ValueError, match=r"^position_ids: got shape \(\d, 11\), expected \(B or 1, 11\)"):
                model(ids, position_ids=wrong)
            for beside in ({}, {"attention_mask": mask}):
                with pytest.raises(ValueError, match=r"^logprobs: position_ids: got shape \(\d, 11\)"):
                    handle.logprobs(ids, position_ids=wrong, **beside)
        with pytest.raises(ValueError, match=r"^position_ids: got shape \(2, 19\), .* of shape \(1, 19\)"):
            model(row, position_ids=positions.expand(2, -1), cu_seq_lens_q=cu, use_cache=False)
        for wrong in (mask[:, 1:], mask[:1], mask[None], mask[0]):
            with pytest.raises(ValueError, match=r"^logprobs: attention_mask: got shape \(.*, expected \(3, 11\)"):
                handle.logprobs(ids, attention_mask=wrong)
        for name, values in (("attention_mask", mask), ("position_ids", positions)):
            with pytest.raises(TypeError, match=f"^logprobs: {name}: got a list, expected a tensor"):
                handle.logprobs(ids, **{name: values.tolist()})
        with pytest.raises(ValueError, match=r"inputs_embeds: got shape \(11, 32\), expected \(B, S, H\)"):
            model(inputs_embeds=torch.zeros(11, 32))
        with pytest.raises(ValueError, match="expected input_ids or inputs_embeds"):
            model()
        with pytest.raises(ValueError, match=r"input_ids: got shape \(1, 0\)"):
            model(ids[:1, :0])
        with pytest.raises(ValueError, match="output_attentions"):
            model(ids, output_attentions=True)
        model.config.output_attentions = True  # without the patch the output has them
        with pytest.raises(ValueError, match="output_attentions: got True, of the call or of the config"):
            model(ids)
        model(ids, output_attentions=False)
        model.config.output_attentions = False
        with pytest.raises(RuntimeError, match=r"autocast: .* float32 here"), torch.autocast("cpu", torch.bfloat16):
            model(ids)
        with pytest.raises(RuntimeError, match="call the patched model, not its layers"):
            cos = torch.ones(1, 3, 16)
            model.model.layers[0].self_attn(torch.zeros(1, 3, 32), position_embeddings=(cos, cos))
        with pytest.raises(ValueError, match="logprobs: attention_mask: got one next to cu_seqlens"):
            handle.logprobs(row, cu_seqlens=cu, attention_mask=mask)
        with pytest.raises(ValueError, match="logprobs: input_ids: got shape"):
            handle.logprobs(row[None])
        model.model.layers[0].self_attn.attention_dropout = 0.5
        with pytest.raises(vx.patch.UnsupportedModule, match=r"layers\.0\.self_attn .*attention_dropout is 0\.5"):
            model.train()(ids)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"slot_mapping": [0, 1, 12]}, "slot_mapping: got 12, expected -1 or 0 to 11"),
        ({"slot_mapping": [0, 1, -2]}, "slot_mapping: got -2"),
        ({"slot_mapping": [0, 1, 1]}, "slot_mapping: got one slot for two tokens"),
        ({"block_table": [[0, 3], [1, 2]]}, "block_table: got page 3 for sequence 0, expected 0 to 2"),
        ({"context_lens": [9, 5]}, "context_lens: got 9 for sequence 0, expected at most 2 pages of 4"),
        ({"context_lens": [5]}, "got 2 rows, 1 lengths and 3 offsets"),
        ({"cu_seqlens_q": [0, 2, 4]}, r"cu_seqlens_q: got \[0, 2, 4\], expected from 0 to the 3 tokens"),
        ({"cu_seqlens_q": [0, 4, 3]}, "cu_seqlens_q: got 4 tokens of sequence 0, expected 0 to 2"),
        ({"context_lens": [5, 0]}, "cu_seqlens_q: got 1 tokens of sequence 1, expected 0 to 0"),
        ({"singles": 1}, "singles: got 1, but sequence 0 has 2 tokens"),
        ({"singles": 3}, "singles: got 3, expected 0 to 2, the sequences"),
    ],
)
@BF16
def test_a_paged_batch_can_be_looked_at(change, message, device, dtype):
    cache = [torch.zeros(3, 4, 1, 16, dtype=dtype, device=device)]
    good = {"block_table": [[0, 1], [2, 99]], "context_lens": [5, 4], "cu_seqlens_q": [0, 2, 3]}
    good |= {"slot_mapping": [3, -1, 11]}

    def batch(fields):
        kinds = {"slot_mapping": torch.int64}
        singles = fields.pop("singles", 0)
        made = {k: torch.tensor(v, dtype=kinds.get(k, torch.int32), device=device) for k, v in fields.items()}
        return vx.patch.PagedBatch(cache, cache, max_seqlen_q=2, **made, singles=singles)

    batch(dict(good)).check()
    batch(good | {"cu_seqlens_q": [0, 1, 3], "singles": 1}).check()
    with pytest.raises(ValueError, match=f"PagedBatch: {message}"):
        batch(good | change).check()


def test_a_cache_of_fixed_size_is_refused():
    from transformers import StaticCache

    model, seqs = tiny("llama"), sequences()
    with vx.patch.hf(model), pytest.raises(ValueError, match="use a DynamicCache"):
        model(seqs[0][None], past_key_values=StaticCache(config=model.config, max_cache_len=32))
    for name in ("llama", "gemma2"):  # whose masks are several
        model = tiny(name)
        said = (
            r"attention_mask: got .*, expected padding .*: no mask that is ready, which generate\(\) makes for a cache"
        )
        with vx.patch.hf(model), pytest.raises(ValueError, match=said):
            model.generate(seqs[0][None], max_new_tokens=2, cache_implementation="static", do_sample=False)


# what else a model goes through


@pytest.mark.parametrize("device,dtype", devices(torch.float32))
def test_weights_may_change_at_any_time(device, dtype):
    model, other = tiny("llama", dtype, device=device), tiny("llama", dtype, seed=7, device=device)
    seqs = sequences(device=device)
    with vx.patch.hf(other):
        expected = alone(other, seqs)
    with vx.patch.hf(model):
        alone(model, seqs)
        model.load_state_dict(other.state_dict())
        assert_bitwise(alone(model, seqs), expected, "load_state_dict")
        with torch.no_grad():
            model.lm_head.weight.mul_(2)
        assert (alone(model, seqs)[0] != expected[0]).all()
        model.train().eval().to(torch.bfloat16)
        assert alone(model, seqs)[0].dtype == torch.float32


def test_gpt2_is_refused_by_the_names_of_what_it_drops():
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = dict(n_layer=1, n_head=2, n_embd=32, vocab_size=64, n_positions=32, bos_token_id=1, eos_token_id=2)
    config = GPT2Config(**sizes, attn_pdrop=0.1, embd_pdrop=0.1, resid_pdrop=0.1)
    for model in (GPT2LMHeadModel(config), GPT2LMHeadModel(config).transformer):
        with pytest.raises(vx.patch.UnsupportedModule, match=r"drop \(Dropout\) and 3 more: p is 0\.1"):
            vx.patch.hf(model)
        assert "_vexact" not in model.__dict__


def test_a_report_is_a_table_in_a_notebook():
    with vx.patch.hf(tiny("llama")) as handle:
        html = handle.report()._repr_html_()
    assert html.count("<tr>") == len(str(handle.report()).splitlines()) > 8 and "<td>rmsnorm</td>" in html


@pytest.mark.parametrize(
    "wrong", [[0, 2, 9], [3, 5], [0, 4, 2, 5], [0, 0], [0], [0, 2**31 - 1], [-(2**31), -7]], ids=str
)
def test_positions_of_offsets_that_nobody_looked_at_touch_no_other_memory(wrong):
    """On a GPU they are not looked at, and what repeated each start as often as they say wrote behind its buffer."""
    assert positions_of(torch.tensor(wrong, dtype=torch.int32), 5).shape == (1, 5)
    right = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    assert positions_of(right, 5).tolist() == [[0, 1, 0, 1, 2]] and positions_of(right, 5).dtype == torch.int64


@pytest.mark.parametrize("after", [True, False], ids=["after the patch", "before it"])
@pytest.mark.parametrize("extra", [nn.Identity, lambda: nn.Linear(4, 4)], ids=["identity", "linear"])
@pytest.mark.parametrize("name,activation", [("llama", "act_fn"), ("phi3", "activation_fn")])
def test_what_was_put_into_a_feed_forward_block_is_named_and_not_its_neighbour(name, activation, extra, after):
    model = tiny(name)
    mlp, ids = model.model.layers[1].mlp, torch.tensor([[1, 2, 3]])
    if not after:
        mlp.add_module("extra", extra())
    with contextlib.ExitStack() as stack:
        if after:
            stack.enter_context(vx.patch.hf(model))
            expected = model(input_ids=ids).logits
            mlp.add_module("extra", extra())
        with pytest.raises(vx.patch.UnsupportedModule) as caught:
            stack.enter_context(vx.patch.hf(model))
            model(input_ids=ids)
        _, line = str(caught.value).split("\n")
        assert line.startswith(f"  model.layers.1.mlp.extra ({type(mlp.extra).__name__}): the forward of ")
        assert line.endswith(
            f"MLP does not know it, and with it model.layers.1.mlp has no aligned form: "
            f"model.layers.1.mlp.{activation} runs aten.silu outside the aligned ops"
        )
        if after:
            del mlp._modules["extra"]
            assert_bitwise(model(input_ids=ids).logits, expected)
