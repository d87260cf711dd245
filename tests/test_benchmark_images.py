"""What decodes behind images are compared with: the trainer, and the same prompts alone, from the cache, preempted."""

import argparse

import pytest

from benchmarks import images

TOWER = {"depth": 2, "hidden_size": 64, "num_heads": 4, "intermediate_size": 96, "deepstack_visual_indexes": [1]}
ROPE = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [6, 5, 5]}
DENSE = images._text(64, 96, 2, 4, 2, head_dim=32, rope_parameters=ROPE)
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40}


def asked(new: int) -> argparse.Namespace:
    return argparse.Namespace(device="cpu", images=2, side=64, new=new, seed=0, layers=None, repeats=1)


@pytest.mark.parametrize("more", [{}, EXPERTS], ids=["dense", "experts"])
def test_what_is_compared(more):
    one, many = images._decodes(asked(40), images.Sizes("tiny", {**DENSE, **more}, TOWER, tied=not more))
    assert one["case"] == "decodes of tiny, 1 prompts of an image of 64 x 64" and "again_numbers" in one
    assert (one["numbers"], one["differ"], one["again_numbers"]) == (40, 0, 0)
    assert (many["numbers"], many["differ"]) == (18 * 40, 0)  # two of them behind other text
    assert (many["again_numbers"], many["again_differ"]) == (2 * 40 * (16 + 2 + 16), 0)
    assert many["preemptions"] > 0
    assert [r.get("routers") for r in (one, many)] == 2 * ["zeros" if more else None]


def test_routers_have_their_weights_back(monkeypatch):
    """Times are of zeros; what is compared is not."""
    timed, seen = images._timed, []
    monkeypatch.setattr(
        images, "_timed", lambda engine, *given: (seen.append(_router(engine.model)), timed(engine, *given))[1]
    )
    made = images._model
    monkeypatch.setattr(images, "_model", lambda *given: seen.append(made(*given)) or seen[0])
    list(images._decodes(asked(40), images.Sizes("tiny", {**DENSE, **EXPERTS}, TOWER)))
    model, *routers = seen
    assert [bool(r) for r in routers] == [True] * 4 + [False] * 4
    assert _router(model)


def _router(model) -> float:
    routers = [p for name, p in model.named_parameters() if name.endswith(".mlp.gate.weight")]
    return sum(float(p.detach().abs().sum()) for p in routers)


def test_a_difference_is_counted(monkeypatch):
    """The twin that must fail."""
    numbers = images._numbers
    monkeypatch.setattr(
        images, "_numbers", lambda a, b: ((x, None) if i == 3 else (x, y) for i, (x, y) in enumerate(numbers(a, b)))
    )
    _, many = images._decodes(asked(40), images.Sizes("tiny", DENSE, TOWER))
    assert many["again_differ"] == 16 + 2 + 16


def test_answers_that_are_too_short_for_the_small_cache_are_said():
    with pytest.raises(ValueError, match="images: --new: got 2, with which nobody gives back pages"):
        list(images._decodes(asked(2), images.Sizes("tiny", DENSE, TOWER)))


def test_the_true_sizes_are_models():
    for sizes in images.SIZES.values():
        config = sizes.config(2, 2)
        assert config.vision_config.out_hidden_size == config.text_config.hidden_size
        assert config.text_config.num_hidden_layers == config.vision_config.depth == 2
    with pytest.raises(argparse.ArgumentTypeError, match="got 'qwen3-vl-9b', expected some of qwen3-vl-2b"):
        images._names("qwen3-vl-2b,qwen3-vl-9b")
