"""LoRA over stages and ranks that are processes, and in replicas: the bits of one process, which are the trainer's, and
adapters that come alone, all of them or none."""

from dataclasses import replace

import pytest
import torch
from handovers import receiving, sender
from safetensors.torch import load_file
from test_adapter_files import WEIGHTS, answers, ask, config, from_peft, save

from vexact_engine import Engine, Replicas

pytestmark = pytest.mark.process
FAMILIES = "Qwen3", "Qwen3Moe"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Of each family a folder, what a trainer of it has, and its adapter's tensors."""
    found = {}
    for name in FAMILIES:
        path = tmp_path_factory.mktemp(name)
        save(name, path)
        found[name] = path, answers(from_peft(path)), load_file(path / "adapter" / WEIGHTS)
    return found


def over(path, adapter, **sizes):
    chosen = replace(config(adapter), **sizes)
    return Engine.from_pretrained(path, device="cpu", tokenizer=False, config=chosen)


def others(adapters):
    g = torch.Generator().manual_seed(5)
    return {name: torch.randn(value.shape, generator=g) * 0.2 for name, value in adapters.items()}


def of_one(path, adapters):
    with over(path / "base", path / "adapter") as engine:
        engine.update_weights(adapters, numerics=engine.numerics())
        return ask(engine), engine.numerics()


def test_stages_take_adapters_as_one_process_does(saved):
    """From none: the base alone, then adapters by an update, and by hand-overs of either kind; asleep they stay."""
    path, expected, first = saved["Qwen3"]
    second = others(first)
    (changed, numerics), plain = of_one(path, second), answers(path / "base")
    state = from_peft(path).state_dict()
    base = {name: value for name, value in state.items() if "lora_" not in name}
    given = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "target_modules": "all-linear"}
    with over(path / "base", given, pipeline_parallel_size=2) as engine:
        assert engine.path == "fused" and engine.numerics() == numerics and ask(engine) == plain
        engine.update_weights(base, numerics=numerics)
        assert ask(engine) == plain
        engine.update_weights(first, numerics=numerics)
        assert ask(engine) == expected
        for wrong in (base, {name: value for name, value in second.items() if "layers.0" in name}):
            with pytest.raises(ValueError, match=r"missing: .*lora_"):
                engine.update_weights(wrong, numerics=numerics)
            assert ask(engine) == expected
        for mode, adapters, then in (("staged", second, changed), ("in_place", first, expected)):
            with receiving(engine, mode) as (receiver, start):
                result = start()
                with sender(receiver, numerics=numerics) as out:
                    out.send(adapters)
                result()
            assert ask(engine) == then
        engine.sleep(1)
        engine.wake_up()
        assert ask(engine) == expected


def test_ranks_of_stages_take_their_rows_of_what_comes(saved):
    path, expected, first = saved["Qwen3Moe"]
    second = others(first)
    changed, numerics = of_one(path, second)
    with over(path / "adapter", None, tensor_parallel_size=2, pipeline_parallel_size=2) as engine:
        assert engine.path == "fused" and engine.numerics() == numerics and ask(engine) == expected
        engine.update_weights(second, numerics=numerics)
        assert ask(engine) == changed
        with receiving(engine, "in_place") as (receiver, start):
            result = start()
            with sender(receiver, numerics=numerics, bucket_bytes=4096) as out:  # in pieces
                out.send(first)
            result()
        assert ask(engine) == expected


def test_replicas_compute_with_it(saved):
    path, expected, first = saved["Qwen3"]
    second = others(first)
    changed, numerics = of_one(path, second)
    chosen = config(path / "adapter")
    with Replicas.from_pretrained(path / "base", replicas=1, device="cpu", tokenizer=False, config=chosen) as engine:
        assert engine.numerics() == numerics and engine.config.adapter == str(path / "adapter")
        assert ask(engine) == expected
        engine.update_weights(second, numerics=numerics)
        assert ask(engine) == changed
