"""Ranks on GPUs of their own, over NCCL and in CUDA graphs: the bits of one, also with drafts, with new weights, and
after sleep."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_models import bits, build, check_idle, prompts

from vexact_engine import Engine, EngineConfig, SamplingParams, Speculation
from vexact_engine.runner.sleep import TAGS

sys.path.insert(0, str(Path(__file__).parents[1] / "patch"))
from families import HYBRIDS, tiny

sys.path.pop(0)
pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices"),
]

CONFIG = EngineConfig(num_pages=2048, page_size=16, max_num_batched_tokens=256, max_num_seqs=32, show_progress=False)
PARAMS = SamplingParams(max_new_tokens=20, seed=1, ignore_eos=True)
MIXED = [
    replace(PARAMS, temperature=i % 3 / 2, top_k=5 * (i % 4 == 1), n=1 + i % 2, num_top_logprobs=i % 3)
    if i % 5
    else replace(PARAMS, prompt_logprobs=True, num_prompt_top_logprobs=3)
    for i in range(24)
]


def ask(engine):
    vocabulary = engine.vocab_size
    done = engine.generate(prompts(24, longest=90, vocabulary=vocabulary), MIXED, raise_on_error=True)
    return [(bits(c), c.top_logprobs, c.prompt_logprobs, c.prompt_top_logprobs) for c in done]


def models(name):
    """A model and another one of the same shape."""
    if name in HYBRIDS:
        pair = [tiny(name, torch.bfloat16) for _ in range(2)]
    else:
        sizes = dict(hidden_size=256, max_position_embeddings=1024)
        pair = [build(name, torch.bfloat16, **sizes) for _ in range(2)]
    with torch.no_grad():
        for p in pair[1].parameters():
            p.mul_(1.25)
    return pair


@pytest.mark.parametrize("ranks, stages", [(2, 1), (4, 1), (2, 2)], ids=["2", "4", "2 x 2 stages"])
@pytest.mark.parametrize(
    "name, whole_experts, latent",
    [
        ("Qwen3", False, False),
        ("Qwen3Moe", False, False),
        ("Qwen3Moe", True, False),
        ("DeepseekV3", False, False),
        ("DeepseekV3", True, True),
        ("qwen3_next", False, False),
    ],
)
def test_ranks_have_the_bits_of_one_gpu(name, whole_experts, latent, ranks, stages, tmp_path):
    if torch.cuda.device_count() < ranks * stages:
        pytest.skip(f"needs {ranks * stages} GPUs, torch sees {torch.cuda.device_count()}")
    model, other = models(name)
    model.save_pretrained(tmp_path)
    first, new = ({k: v.clone() for k, v in one.state_dict().items()} for one in (model, other))
    config = replace(CONFIG, latent_attention=latent)
    with Engine.from_pretrained(tmp_path, device="cuda", config=config) as engine:
        expected, numerics = ask(engine), engine.numerics()
        engine.update_weights(new, numerics=numerics)
        renewed = ask(engine)
    assert renewed != expected
    layout = {"tensor_parallel_size": ranks, "pipeline_parallel_size": stages}
    ranked = replace(config, **layout, expert_parallel_size=ranks if whole_experts else 1)
    for draft in (None, tmp_path):  # the model itself, whole on one of the ranks
        speculation = Speculation(max_draft_tokens=3, always=True, draft_model=draft)
        with Engine.from_pretrained(tmp_path, device="cuda", config=replace(ranked, speculation=speculation)) as engine:
            assert engine.numerics() == numerics
            assert ask(engine) == expected
            assert draft is None or engine.stats.accepted_tokens > 0
    with Engine.from_pretrained(tmp_path, device="cuda", config=ranked) as engine:
        for _ in range(2):  # cold and warm
            assert ask(engine) == expected
        engine.update_weights(new, numerics=engine.numerics())
        assert ask(engine) == renewed
        engine.sleep(level=2)
        assert engine.asleep == TAGS
        engine.wake_up(["weights"])
        engine.update_weights(first, numerics=engine.numerics())
        engine.wake_up()
        assert ask(engine) == expected
        check_idle(engine)


@pytest.mark.parametrize("ranks, stages", [(2, 1), (4, 1), (2, 2)], ids=["2", "4", "2 x 2 stages"])
def test_experts_that_send_have_the_bits_of_one_gpu(ranks, stages, tmp_path):
    """Prompts of a thousand tokens in a step: what their experts compute goes to all ranks while it is computed."""
    if torch.cuda.device_count() < ranks * stages:
        pytest.skip(f"needs {ranks * stages} GPUs, torch sees {torch.cuda.device_count()}")
    sizes = dict(hidden_size=256, moe_intermediate_size=192, num_experts_per_tok=4, max_position_embeddings=1024)
    build("Qwen3Moe", torch.bfloat16, **sizes).save_pretrained(tmp_path)
    config = replace(CONFIG, max_num_batched_tokens=1024)
    with Engine.from_pretrained(tmp_path, device="cuda", config=config) as engine:
        expected = ask(engine)
    layout = {"tensor_parallel_size": ranks, "pipeline_parallel_size": stages}
    with Engine.from_pretrained(tmp_path, device="cuda", config=replace(config, **layout)) as engine:
        for _ in range(3):
            engine.reset_prefix_cache()
            assert ask(engine) == expected
        engine.sleep(level=1)
        engine.wake_up()
        assert ask(engine) == expected
        check_idle(engine)
