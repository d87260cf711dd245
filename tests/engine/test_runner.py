"""Steps in persistent buffers, padded to the sizes of graphs: on a CPU, where a function is its own recording, so that
buffers, padding and sizes are those of a GPU. Bits are those of steps without padding, whatever the sizes."""

import contextlib
import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from engine_models import bits, build, check_idle, prompts
from hypothesis import given, settings
from hypothesis import strategies as st

import vexact_ops as vx
from vexact_engine import Engine, EngineConfig, SamplingParams
from vexact_engine.core.scheduler import Scheduler
from vexact_engine.core.step import Encoder
from vexact_engine.request import Request
from vexact_engine.runner import buffers, graphs
from vexact_engine.runner import ranks as runner_ranks
from vexact_engine.runner.record import Graphs
from vexact_engine.runner.runner import Runner
from vexact_ops._core import admit

CONFIG = EngineConfig(page_size=4, num_pages=160, max_num_seqs=7, max_num_batched_tokens=23, reserve=0.0)
PROMPTS = prompts(12)
PARAMS = [
    SamplingParams(
        max_new_tokens=3 + 4 * (i % 4),
        temperature=(0.0, 0.7, 1.0, 1.3)[i % 4],
        top_k=(0, 0, 7)[i % 3],
        top_p=(1.0, 0.9)[i % 2],
        min_p=(0.0, 0.0, 0.02)[i % 3],
        seed=i,
        ignore_eos=True,
        num_top_logprobs=(0, 0, 0, 2)[i % 4],
    )
    for i in range(len(PROMPTS))
]


@pytest.fixture
def recording(monkeypatch):
    """Steps are padded to sizes that are chosen as on a GPU. Returns how often a recording was used."""
    used = {"decode": 0, "decode_cut": 0, "mixed": 0, "heads": 0, "heads_cut": 0, "mixed_few": 0}
    monkeypatch.setattr(graphs, "recorder", lambda *_: graphs.HostRecorder())
    for name in ("_PADDING", "_PADDING_OF_CHUNKS"):
        monkeypatch.setattr(f"vexact_engine.runner.record.{name}", -2.0)  # every size is split and kept, however long
    monkeypatch.setattr("vexact_engine.runner.record._HIDDEN", 1e9)
    launch, fit = Runner.launch, graphs.Ladder.fit

    def counting(self, step):
        few = [("mixed_few", ladder) for _, ladder in self.graphs.mixed_few]
        for name, ladder in [*((name, getattr(self.graphs, name)) for name in [*used][:-1]), *few]:
            ladder.fit = lambda rows, name=name, ladder=ladder: note(name, fit(ladder, rows))
        return launch(self, step)

    def note(name, found):
        used[name] += found is not None
        return found

    monkeypatch.setattr(Runner, "launch", counting)
    return used


def ladders(runner):
    made = runner.graphs
    few = [ladder for _, ladder in made.mixed_few]
    return made.decode, made.decode_cut, made.mixed, made.heads, made.heads_cut, *few


def outcomes(family, config, params=PARAMS):
    with Engine.from_pretrained(build(family), config=config) as engine:
        done = engine.generate(PROMPTS, params)
        plain = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "num_top_logprobs": 0}
        done += engine.generate(PROMPTS, [replace(p, **plain) for p in params])
        check_idle(engine)
        runner = engine._worker._runner
        sizes = [ladder.sizes for ladder in ladders(runner)]
        return [(bits(c), str(c.top_logprobs)) for c in done], sizes


@pytest.mark.parametrize(
    "family,options",
    [
        ("Llama", {}),
        ("Qwen3", {"kv_segment": 64, "page_size": 3}),
        ("Gemma2", {"max_num_batched_tokens": 5}),
        ("Phi3", {}),
        ("Qwen3Moe", {"num_pages": 17}),  # preempted
        ("DeepseekV3", {"latent_attention": True}),
    ],
)
def test_padded_steps_have_the_bits_of_others(family, options, request):
    config = replace(CONFIG, **options)
    expected, sizes = outcomes(family, config)
    assert not any(sizes)
    used = request.getfixturevalue("recording")
    got, sizes = outcomes(family, config)
    assert got == expected and all(sizes)
    assert {name for name in used if not used[name]} <= ({"mixed"} if "num_pages" in options else set()), used
    assert outcomes(family, replace(config, enforce_eager=True))[0] == expected


def test_short_sequences_in_large_steps(recording):
    """Padding of a step with chunks is more than a sequence may be long: it is cut."""
    config = replace(CONFIG, max_model_len=6, max_num_batched_tokens=40)
    short, params = [p[:3] for p in PROMPTS], [replace(p, max_new_tokens=3) for p in PARAMS]
    done = []
    for eager in (True, False):
        with Engine.from_pretrained(build("Qwen3"), config=replace(config, enforce_eager=eager)) as engine:
            done.append([bits(c) for c in engine.generate(short, params)])
    assert done[0] == done[1] and recording["mixed"]


class Alone:
    """A runner and a scheduler without an engine."""

    def __init__(self, family="Qwen3", config=CONFIG, **options):
        self.model = build(family, **options)
        self.handle = vx.patch.hf(self.model)
        self.runner = Runner(self.model, self.handle, config, torch.device("cpu"))
        self.scheduler, self.encoder = Scheduler(self.runner.config), Encoder()

    def launch(self, lookahead):
        plan = self.scheduler.schedule(lookahead=lookahead)
        return plan, self.runner.launch(self.encoder.encode(plan)) if plan else None

    def drain(self, depth):
        flying = []
        while self.scheduler.has_unfinished or flying:
            while len(flying) < depth:
                plan, pending = self.launch(depth > 1)
                if not plan:
                    break
                flying.append((plan, pending))
            plan, pending = flying.pop(0)
            assert pending.ready()
            self.scheduler.commit(plan, pending.wait())


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("kind", ["recorded", "call by call"])
def test_steps_that_are_launched_ahead_have_the_same_bits(depth, kind, request):
    if kind == "recorded":
        request.getfixturevalue("recording")
    made = []
    for deep in (1, depth):
        alone = Alone(config=replace(CONFIG, num_pages=15))
        requests = [Request(p, q) for p, q in zip(PROMPTS, PARAMS)]
        for one in requests:
            alone.scheduler.add(one)
        alone.drain(deep)
        assert alone.scheduler.stats.preemptions and len(alone.runner.buffers._free) <= 3
        made.append([(s.tokens, s.logprobs, s.raw_logprobs, s.top_logprobs) for r in requests for s in r.sequences])
    assert made[0] == made[1]


def test_steps_of_few_sequences_have_graphs_of_their_own_where_those_win(recording, monkeypatch):
    asked = []
    monkeypatch.setattr(Graphs, "_wins", lambda _, one, other: asked.append((one, other)) or 6 <= one.body.tokens <= 12)
    alone = Alone()
    runner, sent = alone.runner, []
    full = runner.graphs.mixed
    assert [most for most, _ in runner.graphs.mixed_few] == [2, 4] and max(full.sizes) > 12 > min(full.sizes)
    for again in range(2):
        (_, two), (_, four) = runner.graphs.mixed_few
        assert two.sizes == four.sizes == full.sizes
        for size in full.sizes:
            rows = [ladder.fit(size).body for ladder in (two, four, full)]
            assert {replace(body, sequences=0, draws=0) for body in rows} == {replace(rows[-1], sequences=0, draws=0)}
            own = 6 <= size <= 12
            assert [body.draws for body in rows] == [min(m, size) if own else min(7, size) for m in (2, 4)] + [
                min(7, size)
            ]
        if not again:
            assert asked and all(one.body.draws < other.body.draws for one, other in asked)
            asked.clear()
            runner.graphs.capture()
            full = runner.graphs.mixed
    assert not asked, "what has been measured is not measured again"
    send = runner.buffers.send
    runner.buffers.send = lambda step, body, *a, **how: (
        sent.append((len(step.chunks), body)),
        send(step, body, *a, **how),
    )[1]
    for prompt in PROMPTS[:5]:
        alone.scheduler.add(Request(prompt[:3], PARAMS[1]))
        plan, pending = alone.launch(False)
        alone.scheduler.commit(plan, pending.wait())
    for count, body in sent:
        most = next(most for most in (2, 4, 7) if count <= most)
        assert body.tokens <= 12 and body.draws == min(most if body.tokens >= 6 else 7, body.tokens), (count, body)
    assert {count for count, _ in sent} >= {1, 3, 5}


def test_padding_stores_nothing(recording):
    """What no running sequence has is never written to: pages, and last tokens of other slots."""
    alone = Alone()
    alone.scheduler.add(Request(PROMPTS[0], PARAMS[1]))
    buffers = alone.runner.buffers
    for part in buffers.caches:
        for cache in part:
            cache.fill_(7.0)
    buffers.last.fill_(-5)
    seen = set()
    while alone.scheduler.has_unfinished:
        plan, pending = alone.launch(False)
        (chunk,) = plan.chunks
        seen |= {page * 4 + i for page in chunk.pages for i in range(4)}
        alone.scheduler.commit(plan, pending.wait())
        assert set(buffers.last[:-1].tolist()) == {-5, buffers.last[chunk.slot].item()}
    for part in buffers.caches:
        for cache in part:
            written = (cache.flatten(0, 1) != 7.0).flatten(1).any(1).nonzero()[:, 0].tolist()
            assert written and set(written) <= seen
    assert sum(recording.values()) > 5


@pytest.mark.parametrize("kind", ["recorded", "call by call"])
def test_a_last_token_that_is_none_indexes_nothing(kind, request):
    """A step that is launched before the host knows that there is no token for it computes with token 0."""
    if kind == "recorded":
        request.getfixturevalue("recording")
    alone = Alone()
    alone.scheduler.add(Request(PROMPTS[0][:5], PARAMS[1]))
    with torch.no_grad():
        alone.model.model.norm.weight.fill_(torch.nan)
    first = alone.launch(True)
    asked = []
    forward = alone.runner.forward
    alone.runner.forward = lambda batch: (asked.append(batch.input_ids.tolist()), forward(batch))[1]
    second = alone.launch(True)
    assert asked[0][0] == 0
    sampled = first[1].wait()
    assert sampled.token_ids == [-1] and np.isnan(sampled.logprobs[0])
    assert second[1].wait().token_ids == [-1]
    assert alone.runner.buffers.last.min() == -1


@pytest.mark.parametrize("kind", ["recorded", "call by call"])
def test_the_forward_is_asked_for_no_more_rows_than_are_drawn_after(kind, request):
    recorded = kind == "recorded"
    if recorded:
        request.getfixturevalue("recording")
    prompt, seen = list(range(1, 20)), []
    params = SamplingParams(max_new_tokens=2, seed=1, ignore_eos=True)
    with Engine.from_pretrained(build("Qwen3"), config=replace(CONFIG, max_num_batched_tokens=8)) as engine:
        runner = engine._worker._runner
        compute = runner.forward
        runner.forward = lambda batch: (seen.append((len(batch.positions), batch.rows)), compute(batch))[1]
        (done,) = engine.generate([prompt], params)
        if recorded:  # padded; the second token's step has a row of its own
            assert all(len(rows) < count for count, rows in seen[:-1]) and seen[-1][1] is None
        else:
            rows = [None if rows is None else rows.tolist() for _, rows in seen]
            assert [count for count, _ in seen] == [8, 8, 3, 1] and rows == [[0], [0], [2], None]
        seen.clear()
        (scored,) = engine.generate([prompt], replace(params, prompt_logprobs=True))
        assert bits(scored) == bits(done) and len(scored.prompt_logprobs) == 19
        assert [rows for _, rows in seen[:3]] == [None] * 3, "log-probabilities of all tokens are wanted"


def test_behind_attention_a_step_without_a_graph_has_as_many_rows_as_some_step_of_decodes(recording, monkeypatch):
    """Products' kernels are verified for a number of rows: one that no graph has would be new under a request."""
    monkeypatch.setattr("vexact_engine.runner.record._HIDDEN", -1.0)
    prompts, params = PROMPTS[:3], SamplingParams(max_new_tokens=2, temperature=1.0, seed=1, ignore_eos=True)
    expected, seen = [], []
    for sizes in ({3}, {2, 4}):
        with Engine.from_pretrained(build("Qwen3"), config=CONFIG) as engine:
            runner = engine._worker._runner
            assert not runner.graphs.mixed.sizes and sizes <= {*runner.graphs.decode.sizes}
            runner.graphs.decode.keep(sizes)
            compute = runner.forward
            runner.forward = lambda batch, compute=compute: (seen.append(batch.rows), compute(batch))[1]
            expected.append([bits(one) for one in engine.generate(prompts, params)])
        counts = {len(rows) for rows in seen if rows is not None}
        assert counts <= {1, *sizes} and counts & sizes, "1: a step that nothing is drawn after"
        seen.clear()
    assert expected[0] == expected[1]


def test_many_new_pages_have_a_copy_of_their_own(monkeypatch):
    expected, _ = outcomes("Qwen3", CONFIG)
    monkeypatch.setattr(buffers, "_MOST_PAGES", 1)
    assert outcomes("Qwen3", CONFIG)[0] == expected


def test_graphs_are_given_back_and_made_again(recording):
    with Engine.from_pretrained(build("Qwen3"), config=CONFIG) as engine:
        runner = engine._worker._runner
        expected = [bits(c) for c in engine.generate(PROMPTS, PARAMS)]
        sizes = [list(ladder.sizes) for ladder in ladders(runner)]
        before = dict(recording)
        runner.graphs.release()
        assert [bits(c) for c in engine.generate(PROMPTS, PARAMS)] == expected
        assert recording == before
        runner.graphs.capture()
        assert [ladder.sizes for ladder in ladders(runner)] == sizes
        assert [bits(c) for c in engine.generate(PROMPTS, PARAMS)] == expected
        assert recording != before


@pytest.mark.parametrize("way", ["replaced", "slept"])
def test_new_addresses_are_captured_anew(way, recording):
    other = build("Qwen3", seed=1)
    with Engine.from_pretrained(build("Qwen3"), config=CONFIG) as engine:
        expected = [bits(c) for c in engine.generate(PROMPTS, PARAMS)]
        runner, made = engine._worker._runner, []
        record = runner.graphs._recorder.record
        runner.graphs._recorder.record = lambda run: (made.append(run), record(run))[1]
        if way == "slept":
            engine.sleep(1)
            assert not runner.graphs.decode.sizes
            engine.wake_up(["weights"])
            assert not made
            engine.wake_up()
        else:
            engine.model.load_state_dict(build("Qwen3", seed=1).state_dict(), assign=True)
            with Engine.from_pretrained(other, config=CONFIG) as second:
                expected = [bits(c) for c in second.generate(PROMPTS, PARAMS)]
        assert [bits(c) for c in engine.generate(PROMPTS, PARAMS)] == expected
        recordings = {id(ladder.fit(size).replay) for ladder in ladders(runner) for size in ladder.sizes}
        assert len(made) == len(recordings) > 5


def test_a_forward_that_cannot_be_recorded(monkeypatch, caplog):
    expected, _ = outcomes("Qwen3", CONFIG)
    monkeypatch.setattr(graphs, "recorder", lambda *_: graphs.HostRecorder())

    def refuse(self, run, if_settled=False):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(graphs.HostRecorder, "record", refuse)
    assert outcomes("Qwen3", CONFIG) == (expected, [[]] * 5)
    assert "CUDA graphs: none" in caplog.text and "not permitted" in caplog.text


def test_all_layers_are_run_where_one_of_each_leaves_something_to_be_met(recording, monkeypatch):
    """A graph is recorded behind one layer of each kind; where a kernel was to be settled while recording, behind all
    of them, and again."""
    expected, _ = outcomes("Qwen3", CONFIG)
    said, inside, compute, record = [], [], Runner.compute, graphs.HostRecorder.record

    @contextlib.contextmanager
    def one_of_each(self):
        inside.append(self)
        yield
        inside.pop()

    def computing(self, *args, **options):
        said.append("some" if inside else "all")
        return compute(self, *args, **options)

    def recorded(self, run, if_settled=False):
        said.append("if settled" if if_settled else "recorded")
        return None if if_settled else record(self, run)

    monkeypatch.setattr(Runner, "compute", computing)
    monkeypatch.setattr(Runner, "one_of_each", one_of_each)
    monkeypatch.setattr(graphs.HostRecorder, "record", recorded)
    assert outcomes("Qwen3", CONFIG)[0] == expected
    asked = [said[i - 1 : i + 3] for i, one in enumerate(said) if one == "if settled"]
    draws = [one for one in asked if one[1:3] == ["if settled", "recorded"]]  # which have no layers
    assert draws and ["some", "if settled", "all", "recorded"] in asked
    assert all(one == ["some", "if settled", "all", "recorded"] for one in asked if one not in draws)


def test_kernels_are_chosen_in_steps_of_long_contexts(recording, monkeypatch):
    """A step that nothing but padding is in would be timed with attention that has nothing to do."""
    seen = []

    def looked_at(run, capture, about):
        run()
        recorded, its_buffers = made[-1]
        body = recorded.decode_body(int(about.split()[2]))
        context = its_buffers.columns(body)["context"].tolist()
        pages = its_buffers.batch(body)[0].paged.block_table
        seen.append((context, len(pages.unique(dim=0))))
        replays = [capture() for _ in range(3)]
        assert all(replay() >= 0 for replay in replays * 2)
        return []

    made, after, tuned = [], [], Graphs._tune

    def tuning(self, *sizes):
        made.append((self, self._runner.buffers))
        held = tuned(self, *sizes)
        after.append((len(held), bool(self._runner.buffers.table.any())))
        return held

    monkeypatch.setattr(Graphs, "_tune", tuning)
    monkeypatch.setattr(vx, "tune", looked_at)
    got = outcomes("Qwen3", CONFIG)
    longest = min(1024, made[0][1].max_pages * 4)
    assert {len(context) for context, _ in seen} >= set(got[1][0]) and len(seen) > 3
    assert all(
        max(context) == longest and min(context) == longest // min(8, 8 ** (len(context) - 1)) for context, _ in seen
    )
    assert all(context == sorted(context, reverse=True) for context, _ in seen)
    assert all(different == len(context) for context, different in seen) and set(after) == {(1, False)}
    monkeypatch.setattr(vx, "tune", lambda *_: [])
    assert outcomes("Qwen3", CONFIG)[0] == got[0]


@pytest.fixture
def lasting(recording, monkeypatch, tmp_path):
    """Sizes are kept as on a GPU. Returns how many recordings were timed."""
    timed, seconds = [], graphs.HostRecorder.seconds
    monkeypatch.setenv("VEXACT_CACHE", str(tmp_path))
    monkeypatch.delenv("VEXACT_CHOICES", raising=False)
    monkeypatch.setattr(graphs.HostRecorder, "lasting", True)
    monkeypatch.setattr(graphs.HostRecorder, "seconds", lambda *a: timed.append(1) or seconds(*a))
    return timed


def test_sizes_are_chosen_once_for_engines_that_are_alike(lasting, monkeypatch):
    """And the kernels of those sizes are met, and chosen in a step, in each process before they are recorded."""
    met, tuned, compute = [], [], Runner.compute
    monkeypatch.setattr(Runner, "compute", lambda self, body, *a, **k: met.append(body) or compute(self, body, *a, **k))
    monkeypatch.setattr(vx, "tune", lambda run, capture, about: tuned.append(about) or [])
    first = outcomes("Qwen3", CONFIG)
    assert len(lasting) > 10
    steps, chosen = set(tuned), len(lasting)
    for kept in (met, tuned):
        kept.clear()
    assert outcomes("Qwen3", CONFIG) == first and len(lasting) == chosen, "nothing was timed"
    assert tuned and set(tuned) <= steps and len(tuned) == len(first[1][0])
    assert len(met) > sum(map(len, first[1])) - len(first[1][-1])
    outcomes("Qwen3", replace(CONFIG, max_num_seqs=5))
    assert len(lasting) > chosen, "another step, other sizes"


class Pair(runner_ranks.Alone):
    """A rank with another that is like it, but for what that knows of sizes where it has `forgotten`."""

    size, by, forgotten = 2, "a list", False

    def gather(self, x):
        return torch.cat([x, x + (self.forgotten and x.dtype == torch.int64)], 1)


def test_ranks_take_the_sizes_that_all_of_them_know(lasting, monkeypatch):
    monkeypatch.setattr(Runner, "ranks", Pair())
    first = outcomes("Qwen3", CONFIG)
    chosen = len(lasting)
    assert outcomes("Qwen3", CONFIG) == first and 10 < chosen == len(lasting), "nothing was timed"
    monkeypatch.setattr(Pair, "forgotten", True)  # in a graph that one rank has and the other has not, both would wait
    assert outcomes("Qwen3", CONFIG)[0] == first[0] and len(lasting) > chosen
    chosen = len(lasting)
    monkeypatch.setattr(Runner, "ranks", runner_ranks.Alone())
    outcomes("Qwen3", CONFIG)
    assert len(lasting) > chosen, "one rank has other times"


@pytest.mark.parametrize("damage", ["empty", "other kinds", "too large", "not ascending", "no numbers"])
def test_sizes_that_cannot_be_are_chosen_anew(lasting, damage, tmp_path):
    first = outcomes("Qwen3", CONFIG)
    (path,) = [p for p in tmp_path.rglob("*.json") if "chosen" in p.parts]
    content, timed = json.loads(path.read_text()), len(lasting)
    chosen = content["chosen"]
    if damage == "other kinds":
        chosen["more"] = chosen.pop("decodes")
    else:
        wrong = {"empty": [], "too large": [1, 1 << 20], "not ascending": [2, 1, 7], "no numbers": ["1", 7]}
        chosen["decodes"] = wrong[damage]
    path.write_text(json.dumps(content))
    assert outcomes("Qwen3", CONFIG)[0] == first[0] and len(lasting) > timed


def test_no_memory_at_the_start_says_what_to_lower(monkeypatch):
    def full(self, progress=None):
        raise torch.OutOfMemoryError("tried to allocate 3 GiB")

    monkeypatch.setattr(Graphs, "capture", full)
    wanted = r"lower gpu_memory_utilization .*max_num_batched_tokens \(now 23\) or max_num_seqs \(now 7\).* 3 GiB"
    with pytest.raises(torch.OutOfMemoryError, match=wanted):
        Engine.from_pretrained(build("Qwen3"), config=CONFIG)


@pytest.mark.parametrize("where", ["_start", "make_forward"])
def test_no_memory_to_verify_a_kernel_at_the_start_says_so_too(where, monkeypatch):
    """The canonical kernel would serve, ten times slower, for as long as the engine lives."""
    run, meets = getattr(Runner, where), admitting(monkeypatch)

    def meeting(self, *given):
        meets()
        return run(self, *given)

    monkeypatch.setattr(Runner, where, meeting)
    said = r"out of memory at the start: lower gpu_memory_utilization .* k: no memory to verify .* \(3 GiB are wanted\)"
    with pytest.raises(torch.OutOfMemoryError, match=said):
        Engine.from_pretrained(build("Qwen3"), config=CONFIG)
    with pytest.warns(UserWarning, match="no memory to verify"):
        meets()


def admitting(monkeypatch):
    """A function that meets a kernel for which there is no memory."""

    def full(*_):
        raise torch.OutOfMemoryError("3 GiB are wanted")

    monkeypatch.setattr(admit, "_decisions", {})
    fast, canonical = (admit.Candidate(name, full, "v1") for name in ("fast", "canonical"))
    proposal = admit.Proposal("k", [fast], canonical, lambda: [()])
    return lambda: admit.admitted(proposal, "cpu")


# Sizes


@settings(max_examples=200)
@given(st.integers(1, 3000), st.floats(0.01, 0.3), st.sampled_from(["flat", "linear", "steps", "root"]))
def test_padding_costs_what_it_may(most, tolerance, kind):
    asked = []

    def seconds(size):
        asked.append(size)
        return {"flat": 1.0, "linear": 20.0 + size, "steps": 3.0 + -(-size // 64), "root": 5.0 + size**0.5}[kind]

    sizes = graphs.choose(seconds, most, tolerance)
    assert sizes == sorted(set(sizes)) and sizes[-1] == most and set(sizes) <= set(asked)
    assert len(asked) == len(set(asked)) and asked[0] == most
    if kind == "flat":
        assert sizes == [most]
    measured = sorted(asked)
    for low, high in itertools.pairwise(measured):
        assert high - low <= max(1, high // 16) or seconds(high) <= seconds(low) * (1 + tolerance), (low, high)
    for size in measured:
        assert seconds(min(s for s in sizes if s >= size)) <= seconds(size) * (1 + tolerance / 2), size


def test_the_smallest_that_fits():
    ladder = graphs.Ladder()
    for size in (8, 1, 3):
        ladder.put(size, graphs.Recorded(size, None, None))
    assert [ladder.fit(rows) and ladder.fit(rows).body for rows in (1, 2, 3, 4, 8, 9)] == [1, 3, 3, 8, 8, None]
    ladder.keep({3})
    assert ladder.sizes == [3] and ladder.fit(1).body == 3
