"""benchmarks handover_ranks: weights of a trainer's ranks arrive at engines of ranks, and bits are compared first."""

import argparse
import json

import pytest
from transformers import AutoConfig

from benchmarks import __main__ as bench
from benchmarks import handover_ranks
from benchmarks.handover_ranks import Layout


@pytest.fixture
def shape(tmp_path):
    """A folder with the config of a small model, of which random weights are made."""
    sizes = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    AutoConfig.for_model("qwen3", **sizes, **heads).save_pretrained(tmp_path / "shape")
    return str(tmp_path / "shape")


@pytest.mark.process
def test_two_ranks_to_two_replicas_of_two(shape, tmp_path):
    args = bench.parse(["handover_ranks", "--device=cpu", "--repeats=2", "--bucket=1"])
    record = handover_ranks._measure(args, shape, Layout(2, 2, 2), "float32", "whole")
    json.dumps(record)
    assert record["case"] == f"{shape} of float32 from 2 ranks to 2 x TP 2, in_place, 1 MiB" and record["updates"] == 2
    assert record["differ"] == 0 and record["logprobs"] == 2 * (63 + 32 + 6) and record["ms"] > 0
    assert record["together"] == pytest.approx(2 * record["ours"], abs=0.02) and record["unit"] == "GB/s"


@pytest.mark.process
def test_two_ranks_to_two_by_shards(shape):
    args = bench.parse(["handover_ranks", "--device=cpu", "--repeats=1", "--bucket=1"])
    record = handover_ranks._measure(args, shape, Layout(2, 1, 2), "float32", "shards")
    assert record["case"] == f"{shape} of float32 from 2 ranks to TP 2, by shards, in_place, 1 MiB"
    assert record["differ"] == 0 and record["logprobs"] == 63 + 32 + 6 and record["gathering_ms"] is None


@pytest.mark.process
@pytest.mark.parametrize(("layout", "to"), [(Layout(4, 4, 1), "4 x TP 1"), (Layout(2, 2, 2), "2 x TP 2")], ids=str)
def test_shards_to_several_replicas(layout, to, shape):
    args = bench.parse(["handover_ranks", "--device=cpu", "--repeats=1", "--bucket=1"])
    record = handover_ranks._measure(args, shape, layout, "bfloat16", "shards")
    case = f"{shape} of bfloat16 from {layout.trainers} ranks to {to}, by shards, in_place, 1 MiB"
    assert record["case"] == case and record["differ"] == 0
    assert record["logprobs"] == layout.replicas * (63 + 32 + 6) and record["gathering_ms"] is None
    assert record["together"] == pytest.approx(layout.replicas * record["ours"], abs=0.02 * layout.replicas)


def test_a_bit_that_differs_is_an_error():
    before, after = [[1.0, 2.0], [3.0]], [[4.0, 5.0], [6.0]]
    handover_ranks._compare(Layout(1, 1, 2), after, [before], [after])
    with pytest.raises(AssertionError, match="from 1 rank to TP 2: replica 1: 1 log-probabilities differ"):
        handover_ranks._compare(Layout(1, 1, 2), after, [before] * 2, [after, [[4.0, 5.0], [6.0000005]]])
    with pytest.raises(AssertionError, match="replica 0 had these weights before"):
        handover_ranks._compare(Layout(1, 1, 2), after, [after], [after])


def test_layouts():
    two, four = handover_ranks.layouts("2:2x2,4:1x4")
    assert [str(layout) for layout in (two, four)] == ["from 2 ranks to 2 x TP 2", "from 4 ranks to TP 4"]
    assert [two.gpu(i) for i in range(2)] == [0, 2] and [two.replica(i) for i in range(2)] == [0, 1]
    assert [four.gpu(i) for i in range(4)] == [*range(4)] and [four.replica(i) for i in range(4)] == [
        0,
        None,
        None,
        None,
    ]
    for wrong in ("2x2", "3:2x2", "0:1x1", "1:1x2,"):
        with pytest.raises(argparse.ArgumentTypeError, match="expected"):
            handover_ranks.layouts(wrong)
    args = bench.parse(["handover_ranks", "--device=cpu", "--layouts=1:1x2,1:1x1", "--by=shards"])
    assert not list(handover_ranks.run(args))  # one rank holds none
    args = bench.parse(["handover_ranks", "--device=cpu", "--by=rows"])
    with pytest.raises(ValueError, match="--by: got 'rows'"):
        next(handover_ranks.run(args))
    args = bench.parse(["handover_ranks", "--device=cpu", "--held-in=float64"])
    with pytest.raises(ValueError, match="--held-in: got 'float64'"):
        next(handover_ranks.run(args))
