"""Scores of sequences: the engine's are those of the patched model, byte for byte, through the server too."""

import math

import pytest
import torch
from engine_models import byte_tokenizer, check_idle
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

import vexact_ops as vx
from vexact_engine import Classification, Engine, EngineConfig, SamplingParams
from vexact_ops.testing import assert_bitwise

SIZES = {
    "vocab_size": 259,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "eos_token_id": 2,
}
FAMILIES = {
    "qwen3": {"num_labels": 1},
    "llama": {"num_labels": 3, "id2label": {0: "bad", 1: "fair", 2: "good"}, "pad_token_id": None},
    "qwen3_moe": {"num_labels": 2, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
}
LENGTHS = (5, 1, 70, 33, 12)


def made(family, folder, kind=AutoModelForSequenceClassification, **changes):
    torch.manual_seed(0)
    model = kind.from_config(AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family], **changes}))
    model.to(torch.bfloat16).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


def prompts():
    g = torch.Generator().manual_seed(1)
    found = [torch.randint(3, 250, (n,), generator=g).tolist() for n in LENGTHS]
    found[3][-3:] = [0, 0, 0]  # what is padding, at its end
    return [*found, [0, 0]]


def packed(rows):
    ends = torch.tensor([len(row) for row in rows]).cumsum(0)
    cu = torch.nn.functional.pad(ends, (1, 0)).to(torch.int32)
    return (
        torch.tensor([[token for row in rows for token in row]]),
        cu,
        torch.cat([torch.arange(len(row)) for row in rows])[None],
    )


@pytest.fixture(scope="module", params=FAMILIES)
def of_trainer(request, tmp_path_factory):
    """A directory, and what the patched model gives of each prompt alone."""
    folder = made(request.param, tmp_path_factory.mktemp(request.param))
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.bfloat16)
    with vx.patch.hf(model), torch.no_grad():
        return folder, torch.cat([model(input_ids=torch.tensor([row])).logits for row in prompts()])


def scores(found):
    return torch.tensor([one.scores for one in found])


@pytest.mark.parametrize("config", [{}, {"max_num_batched_tokens": 16}, {"enforce_eager": True, "max_num_seqs": 1}])
def test_scores_are_the_patched_model_s(of_trainer, config):
    """In a batch, in chunks, alone, and again from a warm prefix cache."""
    folder, expected = of_trainer
    with Engine.from_pretrained(folder, config=EngineConfig(num_pages=64, show_progress=False, **config)) as engine:
        cold, warm = engine.classify(prompts()), engine.classify(prompts())
        assert_bitwise(scores(cold), expected, "cold")
        assert_bitwise(scores(warm), expected, "warm")
        assert max(one.cached_tokens for one in cold) == 0 < max(one.cached_tokens for one in warm)
        alone = [engine.classify([row])[0] for row in prompts()[:2]]
        assert_bitwise(scores(alone), expected[:2], "alone")
        assert [one.label for one in cold] == [engine.labels[i] for i in expected.argmax(1).tolist()]
        check_idle(engine)


def test_batches_and_packed_rows_have_the_scores_of_a_row_alone(of_trainer):
    folder, expected = of_trainer
    model, rows = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.bfloat16), prompts()
    ids, cu, positions = packed(rows)
    stock = torch.cat([model(input_ids=torch.tensor([row])).logits for row in rows])
    with vx.patch.hf(model) as handle:
        assert_bitwise(model(input_ids=ids, cu_seq_lens_q=cu).logits, expected)
        assert_bitwise(model(input_ids=ids, position_ids=positions).logits, expected)
        width = max(map(len, rows))
        padded = torch.tensor([row + [0] * (width - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
        if model.config.pad_token_id is None:
            with pytest.raises(ValueError, match="attention_mask: got padding, but the config has no pad_token_id"):
                model(input_ids=padded, attention_mask=mask)
            with pytest.raises(ValueError, match="input_ids: got several rows, but the config has no pad_token_id"):
                model(input_ids=padded)  # as without the patch
        else:
            assert_bitwise(model(input_ids=padded, attention_mask=mask).logits, expected)
            left = padded.clone()
            left[0], before = torch.tensor([0] * (width - 5) + rows[0]), mask.clone()
            before[0] = mask[0].flip(0)
            assert_bitwise(model(input_ids=left, attention_mask=before).logits, expected)
        with pytest.raises(ValueError, match=r"logprobs: .* scores sequences, and has no log-probabilities"):
            handle.logprobs(ids)
        labels = torch.zeros(len(rows), dtype=torch.int64 if model.config.num_labels > 1 else torch.float32)
        out = model(input_ids=ids, cu_seq_lens_q=cu, labels=labels)
        out.loss.backward()
        assert all(p.grad is not None for p in model.parameters())
    torch.testing.assert_close(stock.float(), expected, atol=0.05, rtol=0.05)
    assert not torch.equal(stock.float(), expected)  # rounded, and computed in another order


def test_padding_by_another_token_than_the_configs_is_not_scored(tmp_path):
    """A tokenizer's pad_token_id is easily set without the config's: padding would have been scored, silently."""
    model = AutoModelForSequenceClassification.from_pretrained(made("qwen3", tmp_path), dtype=torch.bfloat16)
    ids = torch.tensor([[5, 6, 7, 9, 9], [5, 6, 7, 8, 4]])
    behind, before = (torch.tensor([row, [1] * 5]) for row in ([1, 1, 1, 0, 0], [0, 0, 1, 1, 1]))
    with vx.patch.hf(model), torch.no_grad():
        with pytest.raises(ValueError, match=r"attention_mask: got padding at token 4 of row 0, .* pad_token_id \(0\)"):
            model(input_ids=ids, attention_mask=behind)
        left = model(input_ids=ids.roll(2, 1), attention_mask=before).logits  # nothing is looked for before tokens
        alone = model(input_ids=ids[:1, :3]).logits
        assert_bitwise(left[:1], alone)
        nothing = model(input_ids=ids * 0, attention_mask=torch.tensor([[0] * 5, [1] * 5])).logits
        assert nothing.shape == left.shape  # a row that only fills the batch up is no fault
        model.config.pad_token_id = 9
        assert_bitwise(model(input_ids=ids, attention_mask=behind).logits[:1], alone)


def test_what_scores_does_not_generate_and_the_other_way_round(tmp_path):
    with Engine.from_pretrained(made("qwen3", tmp_path / "scores"), config=EngineConfig(num_pages=16)) as engine:
        (done,) = engine.generate([[5, 6]], SamplingParams(max_new_tokens=1))
        assert done.finish_reason == "error" and "scores sequences, and generates nothing" in done.error
        (wrong,) = engine.classify([[5, 1000]])
        assert wrong == Classification([5, 1000], [], None, 0, wrong.request_id, error=wrong.error)
        assert "expected ids below 259" in wrong.error
        assert engine.labels == ("LABEL_0",)
    folder = made("qwen3", tmp_path / "generates", AutoModelForCausalLM)
    with Engine.from_pretrained(folder, config=EngineConfig(num_pages=16)) as engine:
        assert engine.labels is None
        with pytest.raises(ValueError, match="generates, expected a model that scores sequences"):
            engine.classify([[5, 6]])
    config = EngineConfig(num_pages=16, pipeline_parallel_size=2)
    with pytest.raises(ValueError, match="which scores sequences, expected one process"):
        Engine.from_pretrained(str(tmp_path / "scores"), config=config)


def test_new_weights_are_new_scores(of_trainer):
    folder, expected = of_trainer
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.bfloat16)
    with vx.patch.hf(model) as handle, torch.no_grad():
        model.score.weight.mul_(2)
        with Engine.from_pretrained(folder, config=EngineConfig(num_pages=64)) as engine:
            assert engine.update_weights(model.state_dict(), numerics=handle.numerics()) == 1
            found = engine.classify(prompts())
        assert_bitwise(scores(found), expected * 2)
        assert {one.weight_version for one in found} == {1}


# The server


@pytest.fixture(scope="module")
def http(tmp_path_factory):
    serving = pytest.importorskip("serving")
    folder = made("llama", tmp_path_factory.mktemp("served"))
    with (
        Engine.from_pretrained(folder, config=serving.CONFIG) as engine,
        serving.serve(engine) as server,
        serving.client(server) as client,
    ):
        yield engine, client


def test_answers_have_the_shape_of_vllm_s(http):
    engine, client = http
    texts = ["hello", "a longer text, of some words"]
    expected = engine.classify(texts)
    got = client.post("/classify", json={"model": "tiny", "input": texts, "use_activation": False}).json()
    assert got["object"] == "list" and got["id"].startswith("classify-") and got["model"] == "tiny"
    tokens = sum(len(one.prompt_ids) for one in expected)
    assert got["usage"]["prompt_tokens"] == got["usage"]["total_tokens"] == tokens
    for index, (one, done) in enumerate(zip(got["data"], expected)):
        assert (one["index"], one["label"], one["num_classes"]) == (index, done.label, 3)
        assert one["probs"] == done.scores  # every digit
    ids = client.post("/classify", json={"input": expected[1].prompt_ids, "use_activation": False}).json()
    assert ids["data"][0]["probs"] == expected[1].scores
    (soft,) = client.post("/classify", json={"input": "hello"}).json()["data"]
    assert math.isclose(sum(soft["probs"]), 1) and soft["label"] == expected[0].label
    lines = client.get("/metrics").text.splitlines()
    assert 'vexact_requests_total{endpoint="classify",outcome="ok"} 3.0' in lines


WRONG = {
    "nothing": ({}, 400, "input: Field required"),
    "empty": ({"input": []}, 400, "input: expected a text, a list of token ids"),
    "number": ({"input": 3}, 400, "input: expected a text, a list of token ids"),
    "no tokens": ({"input": [[]]}, 400, "input: no tokens in it"),
    "id": ({"input": [5, 100000]}, 400, "input: got the token id 100000, expected 0 to 258"),
    "long": ({"input": [5] * 1000}, 400, "input: got 1000 tokens, expected at most 199"),
    "field": ({"input": "a", "temperature": 1}, 400, "temperature: there is no such field"),
    "cut": ({"input": "a", "truncate_prompt_tokens": 3}, 400, "truncate_prompt_tokens: this is not served"),
    "model": ({"input": "a", "model": "other"}, 404, "model: got 'other', expected tiny"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_requests_are_told_why(http, name):
    body, status, said = WRONG[name]
    answer = http[1].post("/classify", json=body)
    assert answer.status_code == status and said in answer.json()["error"]["message"], answer.text


def test_paths_of_generation_are_refused_by_name(http):
    answer = http[1].post("/v1/completions", json={"prompt": "hello"})
    assert answer.status_code == 400 and "generates nothing: call classify, or POST /classify" in answer.text
