"""Weights cut by their output rows: of every family the bits of one rank, on every rank, and twins that must fail."""

import dataclasses
import itertools
import random
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from ranks import Later, in_ranks
from test_decoder import LATENT, family, model_of, run, sequences

import vexact_ops as vx
from vexact_engine import EngineConfig
from vexact_engine.parallel.pipeline import PipelineWorker
from vexact_engine.runner.forward import forward
from vexact_engine.runner.ranks import Group, landing_bytes
from vexact_engine.weights.cut import Shard, cut, shapes
from vexact_engine.weights.experts import per_expert
from vexact_engine.weights.load import Loaded
from vexact_engine.weights.partial import Origin
from vexact_engine.weights.rows import Rows
from vexact_engine.weights.update import Piece, Places, Update
from vexact_ops.patch import COVERED
from vexact_ops.patch import description as d
from vexact_ops.testing import assert_bitwise

sys.path.insert(0, str(Path(__file__).parents[1] / "patch"))
from families import HYBRIDS, MIXTURES, NAMED

sys.path.pop(0)
SEQS = sequences((11, 3, 9))


def fits(described, model, size):
    try:
        return bool(cut(described, shapes(model), 0, size))
    except ValueError:
        return False


def outcome(head, states):
    """Of hidden states: logits, draws, log-probabilities."""
    rows = torch.cat(states)
    ids = torch.arange(len(rows)) % 50
    drawn = head.sample(rows, ids, ids + 3, temperature=0.8)
    return [*states, head.logits(rows), *drawn, head.score(rows, ids)]


def ranked(model, described, size, **options):
    def function(decoder, own, head):
        whole = range(len(described.layers))
        return outcome(head, run([(whole, decoder)], own.described, torch.bfloat16, SEQS))

    return in_ranks(model, described, size, function, **options)


def expected(handle):
    described = handle.describe()
    whole = range(len(described.layers))
    with torch.no_grad():
        return outcome(handle, run([(whole, forward(handle)[0])], described, torch.bfloat16, SEQS))


@pytest.mark.parametrize("name", [family(name) for name in COVERED])
def test_every_covered_family_has_the_bits_of_one_rank_on_each(name):
    model, tried = model_of(name), 0
    for latent in (False, True)[: 1 + (name in LATENT)]:
        with vx.patch.hf(model, latent=latent) as handle:
            try:
                described, one = handle.describe(), expected(handle)
            except vx.patch.NotDescribed:  # it runs in one process alone, as the next test has it
                return
            sizes = [size for size in (2, 3, 4) if fits(described, model, size)]
            for size in sizes if name in (*NAMED, *MIXTURES, *HYBRIDS) else sizes[:1]:
                tried += 1
                for found in ranked(model, described, size):
                    assert_bitwise(found, one, f"{size} ranks")
    assert tried


def test_what_no_description_has_words_for_is_refused_by_name():
    with vx.patch.hf(model_of("qwen3")) as handle, pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(handle), "describe", lambda self: (_ for _ in ()).throw(vx.patch.NotDescribed("block 3: a")))
        config = EngineConfig(tensor_parallel_size=2)
        loaded = Loaded(model_of("qwen3"), None, (), "a model", Origin("a", torch.bfloat16), torch.device("cpu"))
        with pytest.raises(ValueError, match="tensor_parallel_size: got 2, expected 1: block 3: a"):
            PipelineWorker(loaded, config)


@pytest.mark.parametrize("name", [family(name) for name in (*MIXTURES, "qwen3_5_moe_text")])
def test_whole_experts_on_ranks_have_the_bits_of_one(name):
    model = model_of(name)
    with vx.patch.hf(model) as handle:
        for found in ranked(model, handle.describe(), 2, whole_experts=True):
            assert_bitwise(found, expected(handle))


@pytest.mark.parametrize("name", [family(name) for name in MIXTURES])
def test_what_experts_compute_goes_as_the_ranks_bring_it(name, monkeypatch):
    """Of each mixture of a step once; but for biased ones, which no kernel sends."""
    model, asked, brought = model_of(name), [], []

    def between(self, gate_up, top_k, activation):
        asked.append((self.rank, tuple(gate_up.shape), top_k, activation))
        return lambda a: brought.append(a.shape) or self.gather(a)

    monkeypatch.setattr(Later, "between", between)
    with vx.patch.hf(model) as handle:
        described = handle.describe()
        parts = [block.part for layer in described.layers for block in layer.blocks]
        experts = [part.experts for part in parts if isinstance(part, d.Mixture)]
        biased = experts[0].gate_up_bias is not None
        for found in ranked(model, described, 2):
            assert_bitwise(found, expected(handle))
        assert len(asked) == (0 if biased else 2 * len(experts)) and bool(brought) is not biased
        assert biased or all(activation == experts[0].activation for *_, activation in asked)
        asked.clear()
        ranked(model, described, 2, whole_experts=True)
        assert not asked, "of whole experts rows are gathered, not columns"
        # room for all columns of the widest
        sizes = shapes(model)
        whole = landing_bytes(described, range(len(described.layers)), sizes, 7, torch.bfloat16)
        down, turned = sizes[experts[0].down], experts[0].turned
        top_k = next(part.router.top_k for part in parts if isinstance(part, d.Mixture))
        assert whole == (0 if biased else 7 * top_k * down[1 if turned else 2] * 2)
        assert landing_bytes(described, range(0), sizes, 7, torch.bfloat16) == 0
        assert landing_bytes(described, range(len(described.layers)), sizes, 7, torch.float32) == 0


@pytest.mark.parametrize("why", ["", "rank 1: other bytes came than a gather brings"])
def test_a_group_asks_once_for_each_kind_of_mixture(why, monkeypatch):
    """And says what it found: on each rank the same, for all of them are asked."""
    asked, landing = [], object()

    def send(given, gate_up, top_k, *, activation):
        asked.append(given)
        return why

    monkeypatch.setattr(vx, "fused_moe_send", send)
    group = Group.__new__(Group)
    group.by, group._peers, group._landing, group._between = "memory of peers", None, None, {}
    weights = torch.zeros(4, 32, 8, dtype=torch.bfloat16)
    group.land(1024)  # without memory of peers there is none
    assert group.between(weights, 2, "silu") == group.gather and not asked
    group._peers = SimpleNamespace(landing=lambda size: landing)
    group.land(0)
    assert group.between(weights, 2, "silu") == group.gather and not asked
    group.land(1024)
    for _ in range(2):
        for kind in ((weights, 2, "silu"), (weights, 2, "gelu_tanh"), (weights[:2], 2, "silu")):
            assert group.between(*kind) == (group.gather if why else landing)
    assert asked == [landing] * 3
    assert group.by.partition(":")[0] == "memory of peers" and group.by.endswith(why)

    def refused(size):
        raise RuntimeError("Peers: rank 0 cannot reach the others' memory: no memory")

    group._peers, group._landing, group._between = SimpleNamespace(landing=refused), None, {}
    group.by = "memory of peers"
    group.land(1024)
    assert group.between(weights, 2, "silu") == group.gather and "no memory" in group.by


EXAMPLES = pytest.mark.parametrize("name", [family(n) for n in ("qwen3", "qwen3_moe", "deepseek_v3", "qwen3_5_text")])


@EXAMPLES
def test_columns_in_another_order_are_found(name):
    model = model_of(name)
    with vx.patch.hf(model) as handle:
        found = ranked(model, handle.describe(), 2, order=(1, 0))
        with pytest.raises(AssertionError, match="differ"):
            assert_bitwise(found[0], expected(handle))


@EXAMPLES
def test_a_rank_with_wrong_rows_is_found(name):
    """Of each of its weights."""
    model = model_of(name)
    with vx.patch.hf(model) as handle:
        described, one = handle.describe(), expected(handle)
        others = cut(described, shapes(model), 0, 2).shards
        layer = described.names(range(1)) & others.keys()
        for name in layer - {described.embedding.weight}:

            def spoil(own, rank, name=name):
                return dataclasses.replace(own, shards={**own.shards, name: others[name]}) if rank else own

            with pytest.raises(AssertionError, match="differ"):
                assert_bitwise(ranked(model, described, 2, spoil=spoil)[0], one)


# The cut


def in_pieces(pairs, size=37):
    for name, value in pairs:
        flat = value.reshape(-1)
        for start in range(0, max(1, flat.numel()), size):
            yield name, Piece(start, flat[start : start + size])


@pytest.mark.parametrize("whole_experts", [False, True], ids=["rows", "experts"])
@pytest.mark.parametrize("name", [family(n) for n in ("mixtral", "deepseek_v3", "llama", "phi3")])
def test_each_rank_takes_its_rows_of_what_comes(name, whole_experts):
    """Whole tensors and runs of elements, stacked experts and one by one, by today's names and by those of old."""
    model = model_of(name)
    with vx.patch.hf(model) as handle:
        described, sizes = handle.describe(), shapes(model)
    whole = dict(model.named_parameters(remove_duplicate=False))
    for rank in range(2):
        shards = cut(described, sizes, rank, 2, whole_experts).shards
        with torch.device("meta"):
            skeleton = type(model)(model.config).to(torch.bfloat16)
        skeleton.tie_weights()
        rows = Rows(Places.of(skeleton), shards)
        held = {}
        for tensor in dict.fromkeys(skeleton.parameters()):
            names = [n for n, p in skeleton.named_parameters(remove_duplicate=False) if p is tensor]
            shard = next((shards[n] for n in names if n in shards), None)
            shape = tensor.shape if shard is None else shard.shape(tensor.shape)
            made = torch.nn.Parameter(torch.full(shape, torch.nan, dtype=whole[names[0]].dtype), requires_grad=False)
            held |= {n: (made, shard) for n in names}
        for n, (made, _) in held.items():
            owner, _, leaf = n.rpartition(".")
            skeleton.get_submodule(owner)._parameters[leaf] = made
        for give in (lambda: model.state_dict().items(), lambda: per_expert(model)):
            for pairs in (give(), in_pieces(give())):
                for made, _ in held.values():
                    made.fill_(torch.nan)
                update = Update(skeleton)
                update.write(pair for pair in rows.of(pairs) if update.knows(pair[0]))
                update.finish()
                for n, (made, shard) in held.items():
                    assert torch.equal(made, whole[n] if shard is None else shard.take(whole[n])), n


@EXAMPLES
def test_ranks_hold_each_row_once(name):
    model = model_of(name)
    with vx.patch.hf(model) as handle:
        described = handle.describe()
        for size in (n for n in (2, 4) if fits(described, model, n)):
            cuts = [cut(described, shapes(model), rank, size) for rank in range(size)]
            for weight, shard in cuts[0].shards.items():
                held = [row for own in cuts for a, b in own.shards[weight].ranges for row in range(a, b)]
                assert sorted(set(held)) == list(range(shapes(model)[weight][shard.dim])), weight
                assert size == 4 or len(held) == len(set(held)), weight  # heads are repeated where ranks are more


def test_the_cut_of_one_weight_with_several_parts():
    """Queries, keys and values in one weight: each rank has some of each, one after another."""
    model = model_of("phi3")
    with vx.patch.hf(model) as handle:
        described = handle.describe()
        part = described.layers[0].blocks[0].part
        own = cut(described, shapes(model), 1, 2)
        mine, weight = own.described.layers[0].blocks[0].part, model.get_parameter(part.q.weight).detach()
        held = own.shards[part.q.weight].take(weight)
        for whole, linear in ((part.q, mine.q), (part.k, mine.k), (part.v, mine.v)):
            rows = weight[slice(*whole.rows)]
            assert torch.equal(held[slice(*linear.rows)], rows[len(rows) // 2 :])


def test_what_does_not_divide_is_named_with_what_would_fit():
    model = model_of("qwen3")
    with vx.patch.hf(model) as handle:
        heads = handle.describe().layers[0].blocks[0].part.heads
        with pytest.raises(
            ValueError, match=rf"tensor_parallel_size: got 5, .*{heads} attention heads.*: expected one of 1, 2"
        ):
            cut(handle.describe(), shapes(model), 0, 5)


@pytest.mark.parametrize("seed", range(20))
def test_runs_of_elements_are_the_rows_that_are_taken(seed):
    draw = random.Random(seed)
    outer, inner, dim = draw.choice([1, 3]), draw.choice([1, 5]), draw.choice([0, 1])
    shape = (outer, 12, inner) if dim else (12, inner)
    whole = torch.arange(outer * 12 * inner if dim else 12 * inner).view(shape)
    begins = sorted(draw.sample(range(13), 4))
    shard = Shard(dim, ((begins[0], begins[1]), (begins[2], begins[3])))
    taken, found = shard.take(whole).contiguous().view(-1), []
    cuts = sorted({0, whole.numel(), *draw.sample(range(whole.numel()), 3)})
    for start, end in itertools.pairwise(cuts):
        for own, at, count in shard.runs(shape, start, end - start):
            assert own == len(found)  # in order, each once
            found += whole.view(-1)[start + at : start + at + count].tolist()
    assert found == taken.tolist() and shard.shape(shape) == tuple(shard.take(whole).shape)
