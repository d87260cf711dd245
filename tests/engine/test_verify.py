"""verify: equal where the stack is aligned, and able to tell where it is not."""

import json
from dataclasses import replace

import pytest
import torch
from engine_models import VOCAB, build, byte_tokenizer

import vexact_ops as vx
from vexact_engine.config import EngineConfig, SamplingParams
from vexact_engine.core.pages import PagePool
from vexact_engine.proof.compare import Sample
from vexact_engine.proof.prompts import Prompt, synthetic_prompts
from vexact_engine.proof.stock import run_stock
from vexact_engine.proof.verify import VerifyError, pack, rescore, verify
from vexact_engine.weights.load import load

TIGHT = EngineConfig(
    page_size=4, num_pages=12, max_num_seqs=3, max_num_batched_tokens=8, reserve=0.0, show_progress=False
)


def prompts(count=6):
    return synthetic_prompts(count, [3, 19, 7], VOCAB, seed=1)


@pytest.fixture(scope="module")
def result():
    model = build("Llama")
    found = verify(
        model, prompts(), SamplingParams(max_new_tokens=14, ignore_eos=True), config=TIGHT, stock=("bfloat16",)
    )
    return model, found


def test_the_engine_under_pressure_equals_training(result):
    _, found = result
    assert found.equal and found.comparison.equal and found.comparison.tokens == 6 * 14
    assert found.comparison.verdict() == "0 of 84 log-probabilities differ (max |diff| 0.0, KL 0.0)"
    for name in ("preemptions", "partial_prefills", "mixed_steps"):
        assert found.statistics[name] > 0, name
    for sample in found.aligned.samples:
        assert sample.rollout.isfinite().all() and (sample.rollout < 0).all()
        assert len(set(sample.rollout.tolist())) > 1


def test_the_stock_stack_answers_too_and_differs(result):
    stock = result[1].stock[0]
    assert stock.comparison.tokens > 0 and stock.comparison.mismatched_tokens > 0
    assert 0 < stock.comparison.max_abs_diff < 1, "the same tokens are compared, or the difference would be large"


def test_gradients_flowed_and_the_model_is_as_it_was(result):
    model, found = result
    g = found.gradients
    assert g.finite and g.norm > 0 and not g.missing and g.sequences >= 2 and g.loss > 0
    assert g.tensors == len(list(model.parameters()))
    assert not model.training and all(p.grad is None for p in model.parameters())
    assert "_vexact" not in model.__dict__
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), build("Llama").parameters()))


def test_json_has_the_agreed_keys(result):
    record = json.loads(json.dumps(result[1].to_json(), allow_nan=False))
    four = {"tokens", "mismatched_tokens", "max_abs_diff", "k3_kl"}
    assert set(record["aligned"]) == set(record["stock"]) == four
    assert {"model", "dtype", "prompts", "seconds", "numerics"} <= set(record)
    assert record["prompts"] == 6 and record["dtype"] == "bfloat16" and record["numerics"] == vx.numerics("cpu")
    for sample in record["samples"]:
        assert sample["rollout_logprobs"] == sample["trainer_logprobs"]


@pytest.mark.parametrize(
    "family,dtype,temperature",
    [("Qwen2", torch.float32, 0.7), ("Gemma2", torch.bfloat16, 1.0), ("Mistral", torch.bfloat16, 0.0)],
)
def test_other_families_dtypes_and_temperatures(family, dtype, temperature):
    params = SamplingParams(max_new_tokens=6, temperature=temperature, top_k=20, top_p=0.9, n=2, ignore_eos=True)
    found = verify(build(family, dtype), prompts(3), params, config=TIGHT)
    assert found.equal and found.comparison.tokens == 3 * 2 * 6
    assert found.gradients.finite and not found.stock and found.to_json()["stock"] is None


def test_a_trainer_with_other_weights_is_caught():
    """The twin that must fail: one weight of the trainer's moves by one bf16 step, and nearly all tokens tell."""
    model = build("Llama")
    found = verify(model, prompts(3), SamplingParams(max_new_tokens=8, ignore_eos=True), config=TIGHT)
    weight = model.model.layers[0].mlp.down_proj.weight
    with torch.no_grad():
        weight[0] = torch.nextafter(weight[0], torch.full_like(weight[0], 10.0))
    rescore(model, found.aligned.samples)
    assert found.comparison.mismatched_tokens > 12 and not found.equal
    assert 0 < found.comparison.max_abs_diff < 0.5 and found.comparison.k3_kl > 0


def test_a_wrong_temperature_is_caught():
    model = build("Llama")
    found = verify(model, prompts(2), SamplingParams(max_new_tokens=5, ignore_eos=True), config=TIGHT)
    rescore(model, found.aligned.samples, temperature=0.99)
    assert found.comparison.mismatched_tokens == 10


def test_gradients_that_are_not_finite_fail_the_verdict():
    found = verify(build("Llama"), prompts(2), SamplingParams(max_new_tokens=3), config=TIGHT)
    found.gradients = replace(found.gradients, nonfinite=("w",))
    assert found.comparison.equal and not found.equal


def test_a_prompt_at_fault_is_reported_and_the_others_go_on():
    bad = [Prompt("long", token_ids=(5,) * 300), Prompt("unknown", token_ids=(VOCAB,))]
    mixed = [bad[0], *prompts(2), bad[1]]
    found = verify(build("Llama"), mixed, SamplingParams(max_new_tokens=4, ignore_eos=True), config=TIGHT)
    assert found.comparison.equal and found.comparison.tokens == 8
    assert [error.split(":")[0] for error in found.errors] == ["long", "unknown"]
    assert "300" in found.errors[0] and str(VOCAB) in found.errors[1]
    (said,) = found.failures  # the others' bits say nothing of these
    assert said == f"2 of 4 prompts were not verified: {found.errors[0]}; {found.errors[1]}" and not found.equal
    assert found.verdict() == f"NOT VERIFIED: {said}. Of the others, {found.comparison.verdict()}"
    with pytest.raises(VerifyError, match=r"no token was generated.*300"):
        verify(build("Llama"), bad[:1], config=TIGHT)


def test_of_several_answers_to_a_prompt_at_fault_one_is_named():
    bad = [Prompt(f"long{i}", token_ids=(5,) * (300 + i)) for i in range(5)]
    params = SamplingParams(max_new_tokens=2, ignore_eos=True, n=2)
    found = verify(build("Llama"), [*bad, *prompts(1)], params, config=TIGHT)
    (said,) = found.failures
    assert said.startswith("5 of 6 prompts were not verified: long0: ") and said.endswith("; and 2 more")
    assert [error.split(":")[0] for error in found.errors] == [f"long{i}" for i in range(5)]
    rescore(build("Llama", seed=1), [s for s in found.aligned.samples if s.token_ids])
    assert len(found.failures) == 2
    assert found.verdict().startswith("NOT EQUAL: rollout against training: ") and said in found.verdict()


def test_texts_come_with_a_tokenizer():
    loaded = load(build("Llama", vocab_size=300), tokenizer=byte_tokenizer())
    found = verify(loaded, [Prompt("a", text="hello")], SamplingParams(max_new_tokens=5), config=TIGHT)
    (sample,) = found.aligned.samples
    assert sample.prompt_ids == byte_tokenizer()("hello")["input_ids"] and sample.prompt_text == "hello"
    assert sample.text == byte_tokenizer().decode(sample.token_ids, skip_special_tokens=True)


def test_arguments_are_checked():
    with pytest.raises(VerifyError, match="params: got 1, expected one for all or one for each of 2"):
        verify(build("Llama"), prompts(2), [SamplingParams()], config=TIGHT)
    with pytest.raises(VerifyError, match="one for all prompts"):
        verify(build("Llama"), prompts(2), [SamplingParams(temperature=t) for t in (1, 0.5)], config=TIGHT)


def test_other_batch_sizes_are_compared_with_the_rollout():
    params = SamplingParams(max_new_tokens=4, n=2, ignore_eos=True)
    found = verify(build("Llama"), prompts(), params, config=TIGHT, batch_sizes=(1, 4, 64))
    assert [(b.batch_size, b.requests, b.tokens, b.mismatched_tokens) for b in found.batches] == [
        (size, 6, 6 * 2 * 4, 0) for size in (1, 4, 64)
    ]
    assert found.equal and [b["batch_size"] for b in found.to_json()["batches"]] == [1, 4, 64]


def test_a_warm_prefix_cache_is_compared_with_the_rollout():
    params = SamplingParams(max_new_tokens=4, ignore_eos=True)
    roomy = replace(TIGHT, num_pages=64)
    found = verify(build("Llama"), prompts(), params, config=roomy, warm=True, batch_sizes=(2,))
    assert (found.warm.tokens, found.warm.mismatched_tokens) == (6 * 4, 0) and found.equal
    # all full pages but for the last token of a prompt, which is always computed
    assert found.warm.prefix_tokens == sum((len(p.token_ids) - 1) // 4 * 4 for p in prompts())
    assert found.batches[0].prefix_tokens == 0, "a batch size was tried on prompts that were known"
    assert found.to_json()["warm"]["prefix_tokens"] == found.warm.prefix_tokens
    with pytest.raises(VerifyError, match="no prefix cache"):
        verify(build("Llama"), prompts(), params, config=replace(roomy, enable_prefix_cache=False), warm=True)
    with pytest.raises(VerifyError, match="no prompt fills a page"):
        verify(build("Llama"), prompts(1), params, config=roomy, warm=True)


def test_engine_and_trainer_take_turns_on_one_model():
    model = build("Qwen3Moe")
    params = SamplingParams(max_new_tokens=4, ignore_eos=True)
    apart, turns = (verify(model, prompts(), params, config=TIGHT, share_weights=share) for share in (False, True))
    assert apart.equal and turns.equal and turns.gradients == apart.gradients
    assert all(torch.equal(a.trainer, b.trainer) for a, b in zip(apart.aligned.samples, turns.aligned.samples))
    assert "_vexact" not in model.__dict__
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), build("Qwen3Moe").parameters()))


def test_gradients_are_those_of_the_whole_backward_pass():
    """They are dropped one by one: their norm is that of all of them, a tied one counts once, what is lost is named."""
    model = build("Llama")
    found = verify(model, prompts(2), SamplingParams(max_new_tokens=4, ignore_eos=True), config=TIGHT, pack_tokens=100)
    with vx.patch.hf(model.train().requires_grad_(True)) as handle:
        rows = [sample.prompt_ids + sample.token_ids for sample in found.aligned.samples]
        picked = [handle.logprobs(torch.tensor(row))[-5:-1] for row in rows]
        grads = torch.autograd.grad(-torch.cat(picked).mean(), list(model.parameters()))
    norm = sum(g.double().square().sum().item() for g in grads) ** 0.5
    assert found.gradients.norm == pytest.approx(norm, rel=1e-3)  # weight gradients sum rows in another order
    model.requires_grad_(False)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 3] = float("nan")
    rescored = rescore(model, found.aligned.samples)
    assert "model.layers.1.mlp.up_proj.weight" in rescored.nonfinite and not rescored.finite


def test_a_prefix_cache_that_holds_something_else_is_caught(monkeypatch):
    """The twin: the first page of a prompt is taken for all that follow it."""
    real = PagePool.match

    def careless(self, tokens, max_pages, known=None):
        pages, parent = real(self, tokens, max_pages, known)
        return pages[:1] * len(pages), parent

    monkeypatch.setattr(PagePool, "match", careless)
    params = SamplingParams(max_new_tokens=4, ignore_eos=True)
    found = verify(build("Llama"), prompts(), params, config=replace(TIGHT, num_pages=64), warm=True)
    assert found.comparison.equal and found.warm.mismatched_tokens > 0 and not found.equal


def test_a_rollout_that_sees_its_batch_is_caught(monkeypatch):
    """The twin: linear layers that round otherwise for few rows."""
    aligned, few = vx.linear, 3

    def by_rows(x, *args, **options):
        y = aligned(x, *args, **options)
        return y if x.numel() > few * x.shape[-1] else y * (1 + 2**-7)

    monkeypatch.setattr(vx, "linear", by_rows)
    found = verify(build("Llama"), prompts(8), SamplingParams(max_new_tokens=4), batch_sizes=(1,))
    assert found.batches[0].mismatched_tokens > 8 and not found.equal


def test_packs_hold_every_sequence_once_in_another_order():
    samples = [Sample("s", "", [1] * n, [2] * (n % 3 + 1), torch.zeros(n % 3 + 1)) for n in range(1, 12)]
    packs = pack(samples, 25, seed=0)
    order = [sample for p in packs for sample, _ in p.members]
    assert sorted(map(id, order)) == sorted(map(id, samples)) and order != samples
    assert len(packs) > 2 and any(len(p.members) > 1 for p in packs)
    for p in packs:
        assert p.ids.shape[1] == p.cu_seqlens[-1] <= 25
        for (sample, offset), end in zip(p.members, p.cu_seqlens[1:].tolist()):
            assert p.ids[0, offset:end].tolist() == sample.prompt_ids + sample.token_ids
    assert [p.ids.shape[1] for p in pack(samples[-1:], 3, seed=0)] == [len(samples[-1].prompt_ids) + 3]


def test_stock_draws_with_min_p():
    """1: none but the likeliest token."""
    options = {"dtype": "float32", "max_new_tokens": 8}
    drawn, greedy = (
        [sample.token_ids for sample in run_stock(build("Llama"), [[3, 4], [5]], **options, **how).samples]
        for how in ({"min_p": 1.0}, {"temperature": 0.0})
    )
    assert drawn == greedy


def test_stock_in_float64_agrees_with_itself():
    """The contrast is rounding and nothing else: with 53 bits there is next to none left of it."""
    ids = [list(p.token_ids) for p in prompts(5)]
    model = build("Llama", torch.float32)
    sides = {d: run_stock(model, ids, dtype=d, max_new_tokens=8, batch_size=4) for d in ("float32", "float64")}
    worst = {dtype: side.comparison.max_abs_diff for dtype, side in sides.items()}
    assert worst["float64"] < 1e-6 and worst["float32"] < 1e-4
    assert model.dtype == torch.float32
    assert [s.prompt_ids for s in sides["float32"].samples] == ids
