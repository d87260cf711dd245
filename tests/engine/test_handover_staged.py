"""A second copy of the weights on a CPU is put in place by exchanging memory, wherever nobody can tell."""

import itertools

import pytest
import torch
from engine_models import build
from handovers import CONFIG, MODES, expected, other, receiving, sender, texts

from vexact_engine import Engine, HandoverFailed
from vexact_engine.handover.packing import pack, unpack
from vexact_engine.weights.experts import per_expert
from vexact_engine.weights.update import Places


def _where(model) -> dict[str, int]:
    return {name: p.data_ptr() for name, p in model.named_parameters()}


@pytest.mark.parametrize("family", ["Llama", "Qwen3Moe", "DeepseekV3"])
def test_two_memories_take_turns(family, sockets):
    """And a set that breaks off is written into the one that is not in use: experts, which are views, too."""
    model = build(family)
    sets = [other(model, seed) for seed in (7, 8, 9)]
    wanted = [expected(family, new) for new in sets]

    def broken():
        yield from list(per_expert(sets[0]))[:-1]
        raise KeyError("no more")

    with Engine.from_pretrained(model, config=CONFIG) as engine, receiving(engine, "staged") as (receiver, start):
        places = [_where(engine.model)]
        path = engine._worker.path
        with sender(receiver, bucket_bytes=4096) as out:
            for new, texted in zip(sets, wanted):
                result = start()
                out.send(per_expert(new))
                result()
                places.append(_where(engine.model))
                assert texts(engine) == texted
                result = start()
                with pytest.raises(KeyError):
                    out.send(broken())
                with pytest.raises(HandoverFailed, match="goes on with the weights that it had"):
                    result()
                assert texts(engine) == texted
        assert places[0] == places[2] and places[1] == places[3]
        assert not set(places[0].values()) & set(places[1].values())
        assert engine._worker.path == path == "fused"


def _shared(model):
    model.share_memory()


def _a_buffer_of_it(model):
    model.register_buffer("seen", model.model.embed_tokens.weight.detach()[:2], persistent=False)


@pytest.mark.parametrize("why", [_shared, _a_buffer_of_it], ids=["shared-memory", "a-buffer-of-a-weight"])
def test_memory_that_others_see_is_written_into(why, sockets):
    model = build("Qwen3")
    new = other(model)
    with Engine.from_pretrained(model, config=CONFIG) as engine:
        why(engine.model)
        texts(engine)  # what has changed place is found
        before = _where(engine.model)
        with receiving(engine, "staged") as (receiver, start), sender(receiver) as out:
            result = start()
            out.send(new.state_dict())
            result()
        assert _where(engine.model) == before
        assert texts(engine) == expected("Qwen3", new)


def test_a_copy_made_while_the_weights_sleep(sockets):
    model = build("Qwen3")
    new, wanted = other(model), expected("Qwen3", other(model))
    with Engine.from_pretrained(model, config=CONFIG) as engine:
        engine.sleep(level=2)
        with receiving(engine, "staged") as (receiver, start), sender(receiver) as out:
            engine.wake_up()
            for version in (1, 2):
                result = start()
                assert out.send(new.state_dict()) == version == result()
                assert texts(engine) == wanted
            engine.sleep(level=1)
            engine.wake_up()
            assert texts(engine) == wanted


def test_tensors_of_a_storage_stay_side_by_side():
    """What is computed as one product lies so in the copy as well; what is a small part of a storage takes no whole
    one."""
    joined = torch.zeros(6, 4)
    module = torch.nn.Module()
    for name, rows in (("q", slice(0, 4)), ("k", slice(4, 6))):
        module.register_parameter(name, torch.nn.Parameter(joined[rows], requires_grad=False))
    module.part = torch.nn.Parameter(torch.zeros(100, 4)[8:12], requires_grad=False)
    found = Places(dict(module.named_parameters()), {}, {}).copy("cpu").targets
    assert found["k"].data_ptr() - found["q"].data_ptr() == 16 * 4
    assert found["q"].untyped_storage().data_ptr() == found["k"].untyped_storage().data_ptr()
    assert found["part"].untyped_storage().nbytes() == found["part"].nbytes


@MODES
def test_tensors_without_an_element_need_not_come(mode, sockets):
    """DeepSeek-V3 without shared experts has such: no bucket holds anything of them."""
    model = build("DeepseekV3", n_shared_experts=0)
    new = other(model)
    assert sum(not p.numel() for p in model.parameters()) == 6
    with Engine.from_pretrained(model, config=CONFIG) as engine, receiving(engine, mode) as (receiver, start):
        with sender(receiver) as one:
            done = start()
            assert one.send(new.state_dict()) == done() == 1
        specs = engine.manifest()
        values = ((name, value.to(specs[name][1])) for name, value in new.state_dict().items())
        came = unpack(pack(values, itertools.repeat(torch.empty(1 << 16, dtype=torch.uint8))))
        assert engine.update_weights(came, numerics=engine.numerics(), specs=specs) == 2
        with pytest.raises(ValueError, match="announced, but did not come: lm_head"):
            rest = [
                (name, value.to(specs[name][1])) for name, value in new.state_dict().items() if name != "lm_head.weight"
            ]
            engine.update_weights(rest, numerics=engine.numerics(), specs=specs)
