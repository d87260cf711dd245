"""Speculation in the engine: whatever is drafted, every byte of every completion is the one without it."""

import asyncio
import functools
import itertools
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_models import bits, build, byte_tokenizer, check_idle, make_late, prompts
from hypothesis import given, settings
from hypothesis import strategies as st

import vexact_ops as vx
from vexact_engine import Engine, EngineConfig, SamplingParams, Speculation
from vexact_engine.runner import graphs, memory

sys.path.insert(0, str(Path(__file__).parents[1] / "patch"))
from families import tiny

sys.path.pop(0)
ROOMY = EngineConfig(num_pages=160, page_size=4, enable_prefix_cache=False, show_progress=False, max_model_len=160)
ALWAYS = Speculation(max_draft_tokens=5, always=True)
KINDS = "Llama", "Qwen3Moe", "qwen3_5_text"
VOCABULARY = {"qwen3_5_text": 61}
PARAMS = [
    SamplingParams(max_new_tokens=24, seed=3, ignore_eos=True),
    SamplingParams(max_new_tokens=30, temperature=0.7, top_k=20, seed=4, min_new_tokens=5, stop_token_ids=range(3, 20)),
    SamplingParams(max_new_tokens=12, temperature=0.0, n=3, seed=5, num_top_logprobs=3),
    SamplingParams(max_new_tokens=16, top_p=0.9, seed=6, prompt_logprobs=True, num_prompt_top_logprobs=2),
    SamplingParams(max_new_tokens=200, seed=7, ignore_eos=True),  # to the end of the context
]


def model(kind):
    return tiny(kind, torch.bfloat16) if kind in VOCABULARY else build(kind)


def near(kind):
    """What is often right: the model with other weights, a little."""
    made, generator = model(kind), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter += 0.008 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    return made


@functools.cache
def asked(kind):
    vocabulary = VOCABULARY.get(kind, 160)
    return [
        (prompt, params)
        for i, prompt in enumerate(prompts(4, longest=70, vocabulary=vocabulary))
        for params in (PARAMS[i % len(PARAMS)], PARAMS[(i + 1) % len(PARAMS)])
    ]


def outcome(c):
    return bits(c), c.top_logprobs, c.prompt_logprobs, c.prompt_top_logprobs, c.stop_reason, c.weight_versions


@functools.cache
def without(kind):
    """What each sample of each request gets with nothing around it and nothing drafted."""
    with Engine.from_pretrained(model(kind), config=ROOMY) as engine:
        return [engine.generate([prompt], params) for prompt, params in asked(kind)]


def drafts(kind, request, how, source):
    """Answers of a kind for each sample of a request."""
    vocabulary = VOCABULARY.get(kind, 160)
    made = []
    for completion in without(kind)[request]:
        right = list(completion.token_ids)
        if how == "wrong":
            right = [(token + 1) % vocabulary for token in right]
        elif how == "mixed":
            right = [token if source.random() < 0.8 else source.randrange(vocabulary) for token in right]
        elif how == "shifted":
            right = right[1:] + right[:1]
        elif how == "random":
            right = [source.randrange(vocabulary) for _ in range(400)]  # longer than the context
        elif how == "longer":
            right += [source.randrange(vocabulary) for _ in range(400)]
        made.append(right)
    return made if how != "none" else ()


configs = st.builds(
    replace,
    st.just(ROOMY),
    page_size=st.sampled_from([1, 4, 16]),
    num_pages=st.sampled_from([170, 260]),
    max_num_seqs=st.sampled_from([2, 256]),
    max_num_batched_tokens=st.sampled_from([7, 64]),
    enable_prefix_cache=st.booleans(),
    async_scheduling=st.booleans(),
    reserve=st.just(0.0),
    speculation=st.builds(
        replace,
        st.just(ALWAYS),
        max_draft_tokens=st.sampled_from([1, 3, 8]),
        always=st.sampled_from([True, True, False]),
        sources=st.sampled_from([("given",), ("text",), ALWAYS.sources]),
    ),
)
how = st.sampled_from(["right", "wrong", "mixed", "shifted", "random", "longer", "none"])


@settings(max_examples=max(6, settings.default.max_examples // 2))
@given(
    st.sampled_from(KINDS),
    configs,
    st.lists(how, min_size=8, max_size=8),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_whatever_is_drafted_no_byte_is_another(kind, config, hows, by_model, source):
    """By a model too: its twin where texts are of no help."""
    config = replace(config, num_pages=-(-config.num_pages // config.page_size))
    if by_model:
        config = replace(config, speculation=replace(config.speculation, draft_model=model(kind)))
    each = [
        (prompt, replace(params, draft=drafts(kind, i, hows[i], source)))
        for i, (prompt, params) in enumerate(asked(kind))
    ]
    with Engine.from_pretrained(model(kind), config=config) as engine:
        if config.async_scheduling:
            make_late(engine, 0.0005)
        for turn in range(2):  # the second finds the first one's answers
            aborted = engine.submit(each[0][0], replace(PARAMS[4], n=2), request_id="gone", notify=lambda: None)
            threading.Timer(0.002 * source.randrange(8), engine.abort, ["gone"]).start()
            done = engine.generate(*zip(*each))
            expected = [completion for several in without(kind) for completion in several]
            assert [outcome(c) for c in done] == [outcome(c) for c in expected]
            engine.abort("gone")
            if turn:
                engine.withdraw(aborted)
        check_idle(engine)
        if config.speculation.always and "right" in hows and "given" in config.speculation.sources:
            assert engine.stats.accepted_tokens > 0


def right(kind):
    """Each request with the answers that it will get."""
    return [
        (prompt, replace(params, draft=[c.token_ids for c in without(kind)[i]]))
        for i, (prompt, params) in enumerate(asked(kind))
    ]


def check(engine, kind, each):
    expected = [completion for several in without(kind) for completion in several]
    done = engine.generate(*zip(*each))
    assert [outcome(c) for c in done] == [outcome(c) for c in expected]
    return done


@pytest.mark.parametrize("kind", KINDS)
def test_graphs_of_drafts_have_the_bits_of_others(kind, monkeypatch):
    """As on a GPU: steps of decodes with drafts are padded to sizes of their own."""
    monkeypatch.setattr(graphs, "recorder", lambda *_: graphs.HostRecorder())
    for name in ("_PADDING", "_PADDING_OF_CHUNKS"):
        monkeypatch.setattr(f"vexact_engine.runner.record.{name}", -2.0)  # every size is split and kept
    config = replace(ROOMY, max_num_seqs=6, max_num_batched_tokens=40, speculation=ALWAYS)
    with Engine.from_pretrained(model(kind), config=config) as engine:
        made = engine._worker._runner.graphs
        used, fits = [], {name: getattr(made, name).fit for name in ("verify", "verify_cut")}
        for name, fit in fits.items():
            getattr(made, name).fit = lambda rows, name=name, fit=fit: used.append((name, rows)) or fit(rows)
        check(engine, kind, right(kind))
        assert {name for name, _ in used} == set(fits) and max(rows for _, rows in used) > 12
        assert max(made.verify.sizes) == max(made.verify_cut.sizes) == 36
        assert engine.stats.accepted_tokens > 50


@pytest.mark.process
@pytest.mark.parametrize(
    "kind,cut",
    [
        ("Llama", {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}),
        ("qwen3_5_text", {"pipeline_parallel_size": 2}),
        ("Qwen3Moe", {"tensor_parallel_size": 2, "async_scheduling": True}),
    ],
    ids=["dense, stages of ranks", "hybrid, stages", "mixture, ranks"],
)
def test_stages_and_ranks_verify_drafts(kind, cut, tmp_path):
    """Those that are given, and where none are those of a model in the last stage."""
    for name, one in (("own", model(kind)), ("draft", near(kind))):
        one.save_pretrained(tmp_path / name)
    speculation = replace(ALWAYS, sources=("given",), draft_model=str(tmp_path / "draft"))
    config = replace(ROOMY, max_num_batched_tokens=40, speculation=speculation, **cut)
    with Engine.from_pretrained(tmp_path / "own", device="cpu", config=config) as engine:
        assert engine.config.speculation == speculation
        counts = [(0, 0)]
        wrong = [(p, replace(q, draft=[t[::-1] for t in q.draft])) for p, q in right(kind)]
        for each in (right(kind), wrong, asked(kind)):
            check(engine, kind, each)
            counts.append((engine.stats.drafted_tokens, engine.stats.accepted_tokens))
        given, missed, by_model = ((b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(counts))
        assert given[1] > 50 and missed[0] > missed[1] and by_model[0] > by_model[1] > 10
        check_idle(engine)


def test_metrics_count_drafts_and_tokens_come_together():
    each = right("Llama")
    with Engine.from_pretrained(build("Llama"), config=replace(ROOMY, speculation=ALWAYS)) as engine:
        done = engine.generate([each[0][0]], each[0][1])[0]

        async def stream():
            return [i async for i in engine.stream(*each[0])]

        news = asyncio.run(stream())
    assert (done.metrics.drafted_tokens, done.metrics.accepted_tokens) == (19, 19)
    assert len(done.metrics.token_times) == 24 and len(set(done.metrics.token_times)) == 5
    assert [t for i in news for t in i.token_ids] == done.token_ids and len(news) == 5
    assert [p for i in news for p in i.logprobs] == done.logprobs
    with Engine.from_pretrained(build("Llama"), config=ROOMY) as engine:
        found = engine.generate([each[0][0]], each[0][1])[0].metrics
        assert found.drafted_tokens == found.accepted_tokens == engine.stats.drafted_tokens == 0


def test_texts_end_where_they_end_without_drafts():
    """A stop string may end in the midst of what one step has drawn; nothing behind it is kept."""
    params = [SamplingParams(max_new_tokens=60, seed=seed, n=2, ignore_eos=True) for seed in range(4)]
    config = replace(ROOMY, num_pages=300)
    prompts_of = ["a", "bc", "def", "ghi"]

    def ask(speculation, asking):
        with Engine.from_pretrained(
            build("Llama", vocab_size=259), config=replace(config, speculation=speculation), tokenizer=byte_tokenizer()
        ) as engine:

            async def stream(prompt, one):
                return [(i.index, i.text) async for i in engine.stream(prompt, one)]

            done = engine.generate(prompts_of, asking)
            texts = []
            for prompt, one in zip(prompts_of, asking):
                news = asyncio.run(stream(prompt, one))
                texts.append(["".join(t for i, t in news if i == index) for index in range(2)])
        assert [c.text for c in done] == [text for two in texts for text in two]
        return done

    whole = ask(None, params)
    stops = [replace(p, stop=(whole[2 * i].text[20:22], whole[2 * i + 1].text[31:32])) for i, p in enumerate(params)]
    drafted = [replace(p, draft=[whole[2 * i].token_ids, whole[2 * i + 1].token_ids]) for i, p in enumerate(stops)]
    expected = ask(None, stops)
    assert {c.finish_reason for c in expected} == {"stop"} and len({len(c.token_ids) for c in expected}) > 2
    got = ask(ALWAYS, drafted)
    assert [outcome(c) for c in got] == [outcome(c) for c in expected]
    assert sum(c.metrics.accepted_tokens for c in got) > 30


@pytest.mark.parametrize("keep", [True, False])
def test_new_weights_between_steps(keep):
    """Drafts of the old weights' answers; what runs goes on with the new ones."""
    second = build("Llama", seed=1)
    state = {name: value.clone() for name, value in second.state_dict().items()}
    prompt, params = asked("Llama")[0][0], replace(PARAMS[4], max_new_tokens=60)

    def ask(speculation, at):
        with Engine.from_pretrained(build("Llama"), config=replace(ROOMY, speculation=speculation)) as engine:
            answer = engine.generate([prompt], params)[0].token_ids
            got, commit = [], engine._scheduler.commit

            def slowed(*args):
                time.sleep(0.05)  # whoever reads the stream keeps up with the engine
                return commit(*args)

            engine._scheduler.commit = slowed

            async def stream():
                async for news in engine.stream(prompt, replace(params, draft=answer)):
                    got.extend(news.token_ids)
                    if at <= len(got) and engine.weight_version == 0:
                        await asyncio.to_thread(update)
                    if news.completion is not None:
                        return news.completion

            def update():
                engine.update_weights(state, numerics=engine.numerics(), keep_cache=keep)

            return asyncio.run(stream())

    done = ask(ALWAYS, 12)
    switched = done.weight_versions.index(1)
    assert 12 <= switched < 60 and done.metrics.accepted_tokens > 8
    # Without drafts, updated behind the same token.
    with Engine.from_pretrained(build("Llama"), config=ROOMY) as engine:
        begun = engine.generate([prompt], replace(params, max_new_tokens=switched))[0]
    assert begun.token_ids == done.token_ids[:switched] and begun.logprobs == done.logprobs[:switched]
    if not keep:
        with Engine.from_pretrained(second, config=ROOMY) as engine:
            rest = engine.generate([[*prompt, *begun.token_ids]], replace(params, max_new_tokens=60 - switched))[0]
        assert rest.token_ids == done.token_ids[switched:] and rest.logprobs == done.logprobs[switched:]


def test_logits_that_are_no_numbers_end_a_request_where_they_end_it_without_drafts():
    """A token's embedding is broken. Whoever draws it fails with the next; whoever only drafted it does not."""
    broken = build("Qwen3")
    with Engine.from_pretrained(build("Qwen3"), config=ROOMY) as engine:
        plain = engine.generate([[5, 6, 7]], SamplingParams(max_new_tokens=20, seed=1, ignore_eos=True))[0]
    bad = plain.token_ids[9]
    assert bad not in plain.token_ids[:9] and bad not in (5, 6, 7)
    with torch.no_grad():
        broken.get_input_embeddings().weight[bad] = float("nan")
    got = []
    for speculation in (None, ALWAYS):
        with Engine.from_pretrained(broken, config=replace(ROOMY, speculation=speculation)) as engine:
            right = SamplingParams(max_new_tokens=20, seed=1, ignore_eos=True, draft=plain.token_ids)
            wrong = SamplingParams(max_new_tokens=9, seed=1, ignore_eos=True, draft=[bad] * 20)
            done = engine.generate([[5, 6, 7], [5, 6, 7]], [right, wrong])
            got.append([(c.token_ids, c.logprobs, c.finish_reason, c.error) for c in done])
            check_idle(engine)
    assert got[0] == got[1] and "after 13 tokens are not finite" in got[0][0][3]
    assert got[0][0][0] == plain.token_ids[:10] and got[0][1][0] == plain.token_ids[:9]


def test_a_draft_that_is_none_is_refused_by_name():
    with Engine.from_pretrained(build("Llama"), config=replace(ROOMY, speculation=ALWAYS)) as engine:
        params = SamplingParams(max_new_tokens=2, seed=1)
        done = engine.generate([[5]] * 3, [replace(params, draft=[3, 160]), params, replace(params, draft=[[2**40]])])
        assert [c.error for c in done] == [
            "draft has 160, expected ids below 160", None, f"draft has {2**40}, expected ids below 160",
        ]  # fmt: skip
    for draft, error in (
        ("abc", TypeError), (5, TypeError), ([1.5], TypeError), ([[1], 2], TypeError), ([True], TypeError),
        ({1: 2}, TypeError), ([-1], ValueError), ([[1]] * 3 + [[2**63]], ValueError), ([0] * (1 << 21), ValueError),
    ):  # fmt: skip
        with pytest.raises(error, match="SamplingParams: draft"):
            SamplingParams(draft=draft)
    assert SamplingParams(draft=torch.tensor([1, 2])).draft == ((1, 2),)
    for answer in ([1, 2], [3], []):
        assert SamplingParams(draft=np.array(answer, np.int64)).draft == ((tuple(answer),) if answer else ())
    assert SamplingParams(draft=[[1, 2], (), [3]]).draft == ((1, 2), (3,)) and SamplingParams(draft=None).draft == ()


def test_what_is_no_speculation_is_refused():
    for fields, error, text in (
        ({"max_draft_tokens": 0}, ValueError, "max_draft_tokens is 0, expected an integer from 1 to 64"),
        ({"max_draft_tokens": 65}, ValueError, "max_draft_tokens is 65"),
        ({"max_draft_tokens": True}, TypeError, "max_draft_tokens"),
        ({"sources": ()}, ValueError, "sources is .*expected some of given, answers, samples, text"),
        ({"sources": ("mtp",)}, ValueError, "sources"),
        ({"sources": (1,)}, TypeError, "sources"),
        ({"answer_tokens": 0}, ValueError, "answer_tokens"),
        ({"always": 1}, TypeError, "always"),
    ):
        with pytest.raises(error, match=text):
            Speculation(**fields)
        with pytest.raises(error, match=text):
            EngineConfig(speculation=fields)
    with pytest.raises(ValueError, match="EngineConfig: speculation has depth, expected max_draft_tokens, sources"):
        EngineConfig(speculation={"depth": 1})
    with pytest.raises(TypeError, match=r"EngineConfig: speculation is 5 .*expected a Speculation or None"):
        EngineConfig(speculation=5)
    assert EngineConfig(speculation={"sources": ["text", "given"]}).speculation.sources == ("given", "text")
    assert Speculation(sources="text").sources == ("text",)


def test_answers_go_to_the_next_engine(tmp_path):
    prompt, params = asked("Llama")[0][0], replace(PARAMS[0], n=2)
    config = replace(ROOMY, speculation=ALWAYS)
    with Engine.from_pretrained(build("Llama"), config=config) as engine:
        first = engine.generate([prompt], params)
        engine.save_answers(tmp_path / "kept")
    with Engine.from_pretrained(build("Llama"), config=config) as engine:
        with pytest.raises(FileNotFoundError):
            engine.load_answers(tmp_path / "nothing")
        engine.load_answers(tmp_path / "kept")
        again = engine.generate([prompt], params)
        assert [outcome(c) for c in again] == [outcome(c) for c in first]
        assert all(c.metrics.accepted_tokens == 19 for c in again)
    said = pytest.raises(ValueError, match='save_answers: this engine keeps none: "answers" is no source')
    with Engine.from_pretrained(build("Llama"), config=ROOMY) as engine, said:
        engine.save_answers(tmp_path / "none")


def test_memory_of_states_is_as_it_was_without_speculation():
    with vx.patch.hf(model("qwen3_5_text")) as handle:
        found = handle.memories()
    plain, longer = (memory.forgetting(found, replace(ROOMY, speculation=one)) for one in (None, ALWAYS))
    assert plain == found
    rings = [[kept.shape[0] for kept in each[0].tensors if kept.ring] for each in (plain, longer)]
    assert rings == [[4], [16]]


def test_sizes_of_graphs_are_shared_but_for_those_of_drafts(monkeypatch, tmp_path):
    """An engine that drafts chooses sizes of steps with drafts alone: the others are those of one that does not."""
    monkeypatch.setenv("VEXACT_CACHE", str(tmp_path))
    monkeypatch.delenv("VEXACT_CHOICES", raising=False)
    monkeypatch.setattr(graphs, "recorder", lambda *_: graphs.HostRecorder())
    monkeypatch.setattr(graphs.HostRecorder, "lasting", True)
    monkeypatch.setattr(vx, "tune", lambda *_: [])
    chosen, choose, counts = [], graphs.choose, []
    monkeypatch.setattr(graphs, "choose", lambda *a: chosen.append(1) or choose(*a))
    for speculation in (None, ALWAYS, None, ALWAYS, replace(ALWAYS, max_draft_tokens=2)):
        config = replace(ROOMY, max_num_seqs=4, max_num_batched_tokens=16, speculation=speculation)
        with Engine.from_pretrained(build("Llama"), config=config) as engine:
            verified = engine._worker.verified
            assert list(verified) == engine._worker._runner.graphs.verify.sizes and all(verified.values())
        counts.append(len(chosen))
        chosen.clear()
    assert counts == [3, 1, 0, 0, 1]
