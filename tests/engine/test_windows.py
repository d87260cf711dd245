"""Layers with a window give their pages back: sequences longer than all pages of theirs, with the trainer's bits."""

import functools
import threading
from dataclasses import replace

import pytest
import torch
from conftest import devices
from engine_models import bits, build, check_idle

import vexact_ops as vx
from vexact_engine import Engine, EngineConfig, SamplingParams, Speculation
from vexact_engine.runner import memory
from vexact_engine.runner.buffers import Body
from vexact_ops.testing import assert_bitwise

OPTIONS = {"max_position_embeddings": 1024}
KINDS = {  # a window in every layer, or in each second one; pages that there are of those
    "Mistral": {"num_pages": 24},
    "Gemma2": {"num_pages": 200, "num_window_pages": 24},
}
each_kind = pytest.mark.parametrize("kind", KINDS)
each_device = pytest.mark.parametrize("device,dtype", devices(torch.bfloat16))
CONFIG = EngineConfig(max_num_seqs=4, max_num_batched_tokens=90, reserve=0.0, show_progress=False)


def ids(lengths, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 61, (length,), generator=generator).tolist() for length in lengths]


(SHARED,) = ids((170,), seed=1)
PROMPTS = [*ids((450, 3, 200)), [*SHARED, 5, 6], [*SHARED, 7, 8, 9], SHARED[:100]]  # 24 pages have 384 tokens
PARAMS = [SamplingParams(max_new_tokens=40 + 9 * i, seed=i, ignore_eos=True) for i in range(len(PROMPTS))]


def launch(kind: str, device="cpu", dtype=torch.bfloat16, **options):
    model = build(kind, dtype, device=device, **OPTIONS)
    return Engine.from_pretrained(model, device=device, config=replace(CONFIG, **{**KINDS[kind], **options}))


@functools.cache
def done(kind: str, device, dtype):
    """By an engine whose sequences give back nothing, for there is nothing to share."""
    with launch(kind, device, dtype, num_pages=300, num_window_pages=300) as engine:
        assert engine.config.num_window_pages in (None, 300)
        return [bits(completion) for completion in engine.generate(PROMPTS, PARAMS)]


@each_kind
@each_device
def test_sequences_longer_than_all_pages(kind, device, dtype):
    with launch(kind, device, dtype) as engine:
        windows = engine._scheduler.pool.windows
        assert engine.path == "fused" and windows.count == engine.config.num_window_pages == 24
        got = [bits(completion) for completion in engine.generate(PROMPTS, PARAMS)]
        assert engine.stats.prefix_tokens >= 160
        check_idle(engine)
        assert windows.num_available == windows.count
    assert got == done(kind, device, dtype)
    with vx.patch.hf(build(kind, dtype, device=device, **OPTIONS)) as handle, torch.no_grad():
        for prompt, (tokens, numbers, *_) in zip(PROMPTS, got):
            row = torch.tensor([prompt + tokens], device=device)
            trained = handle.logprobs(row)[0][len(prompt) - 1 : -1]
            assert_bitwise(trained.cpu(), torch.tensor(numbers[1], dtype=torch.int32).view(torch.float32))


@each_kind
@pytest.mark.parametrize(
    "options",
    [
        {"page_size": 8, "max_num_batched_tokens": 17},
        {"async_scheduling": True, "enable_prefix_cache": False},
        {"speculation": Speculation(max_draft_tokens=4, always=True)},
    ],
    ids=["chunks", "plans-in-flight", "drafts"],
)
def test_it_changes_nothing(kind, options):
    with launch(kind, **options) as engine:
        for _ in range(2):
            assert [bits(c) for c in engine.generate(PROMPTS, PARAMS)] == done(kind, "cpu", torch.bfloat16)
        engine.sleep(1)
        engine.wake_up()
        assert [bits(c) for c in engine.generate(PROMPTS[:2], PARAMS[:2])] == done(kind, "cpu", torch.bfloat16)[:2]
        check_idle(engine)


@each_kind
def test_load_says_what_is_held(kind):
    """While a sequence of 500 tokens runs: of all layers with a window the pages that it has, not those it has had."""
    seen = []
    with launch(kind, num_pages=200, num_window_pages=24, max_num_seqs=1) as engine:
        params, done = replace(PARAMS[0], max_new_tokens=50), threading.Event()
        engine.submit(PROMPTS[0], params, notify=done.set, listen=lambda _: seen.append(engine.load()))
        assert done.wait(300)
        load, least = seen[20], engine._scheduler.windows.least
        whole = len(PROMPTS[0]) // engine.config.page_size
        if kind == "Mistral":
            assert (load.pages, load.window_pages, load.window_pages_used) == (24, 0, 0)
            assert 0 < load.pages_used <= least + 1 < whole
        else:
            assert (load.pages, load.window_pages) == (200, 24) and load.pages_used >= whole
            assert 0 < load.window_pages_used <= least + 1
        check_idle(engine)
        assert (engine.load().pages_used, engine.load().window_pages_used) == (0, 0)


@each_kind
def test_a_model_that_drafts_keeps_all_keys(kind):
    """Its layers have windows too, and pages of the pool's numbers."""
    draft = Speculation(draft_model=build("Mistral", **OPTIONS), sources=(), max_draft_tokens=3, always=True)
    with launch(kind, num_pages=200, num_window_pages=24, speculation=draft) as engine:
        assert (engine.config.num_pages, engine.config.num_window_pages) == (200, 24)
        assert {len(cache) for cache in engine._worker._runner.beside.buffers.caches.tensors()} == {200}
        assert [bits(c) for c in engine.generate(PROMPTS, PARAMS)] == done(kind, "cpu", torch.bfloat16)
        assert engine.stats.drafted_tokens > 50
        right = engine.stats.accepted_tokens == engine.stats.drafted_tokens
        assert right == (kind == "Mistral")  # which drafts for itself
        check_idle(engine)


def test_a_patched_forward(monkeypatch):
    monkeypatch.setattr("vexact_engine.runner.forward.fuse", lambda *args: (None, "for the test"))
    with launch("Gemma2") as engine:
        assert engine.path.startswith("patched")
        assert [bits(c) for c in engine.generate(PROMPTS, PARAMS)] == done("Gemma2", "cpu", torch.bfloat16)


@each_kind
def test_what_is_given_back_may_hold_nan(kind):
    """Pages of a sequence that is none go to others, and stand in their tables once those have left them."""
    model, lost = build(kind, **OPTIONS), 70
    with torch.no_grad():
        model.get_input_embeddings().weight[lost] = torch.nan
    config = replace(CONFIG, **KINDS[kind], enable_prefix_cache=False, max_num_seqs=2)
    with Engine.from_pretrained(model, device="cpu", config=config) as engine:
        expected = [c.logprobs for c in engine.generate(PROMPTS[:3], PARAMS[:3])]
        poisoned = [[lost] * 300, PROMPTS[0], [lost] * 150, *PROMPTS[1:3], [lost] * 200]
        params = [PARAMS[5], PARAMS[0], PARAMS[5], *PARAMS[1:3], PARAMS[5]]
        got = [c.logprobs for c in engine.generate(poisoned, params, raise_on_error=False)]
        assert [got[1], *got[3:5]] == expected


def test_steps_of_padding_leave_what_the_prefix_cache_knows():
    with launch("Gemma2") as engine:
        expected = [bits(c) for c in engine.generate(PROMPTS[3:], PARAMS[3:])]
        buffers, reused = engine._worker._runner.buffers, engine.stats.prefix_tokens
        known = buffers.beside.clone()
        with buffers.long_padding(Body(2, 2, 2, 1, 1, 4, all_drawn=True), [50, 60]):
            assert not torch.equal(buffers.beside, known)
        assert torch.equal(buffers.beside, known)
        assert [bits(c) for c in engine.generate(PROMPTS[3:], PARAMS[3:])] == expected
        assert engine.stats.prefix_tokens > reused


@pytest.mark.process
def test_a_stage_may_have_windows_alone(tmp_path):
    build("Gemma2", **OPTIONS).save_pretrained(tmp_path)
    config = replace(CONFIG, **KINDS["Gemma2"], pipeline_parallel_size=2)
    with Engine.from_pretrained(tmp_path, device="cpu", config=config) as engine:
        assert engine.config.num_window_pages == 24
        assert [bits(c) for c in engine.generate(PROMPTS, PARAMS)] == done("Gemma2", "cpu", torch.bfloat16)


def counted(kind, monkeypatch, mebibytes=None, **options):
    """(num_pages, num_window_pages) of an engine, with so much memory."""
    if mebibytes is not None:
        monkeypatch.setattr(memory, "CPU_SHARE", 1.0)
        monkeypatch.setattr(memory, "available_bytes", lambda: mebibytes << 20)
    free = {"num_pages": None, "num_window_pages": None, **options}
    with launch(kind, **free) as engine:
        return engine.config.num_pages, engine.config.num_window_pages


def test_how_many_pages(monkeypatch):
    """A page takes 2 KiB in each of two layers; 4 sequences of 1,024 tokens take 256 of them."""
    step, each = 6, 9 + 1 + 2  # of a window: what a step adds, and 138 tokens before a query
    assert counted("Gemma2", monkeypatch, num_pages=100) == (100, 4 * each + step)
    assert counted("Gemma2", monkeypatch, num_pages=40) == (40, None)
    assert counted("Gemma2", monkeypatch, 64) == (256, 4 * each + step)
    assert counted("Gemma2", monkeypatch, 1, max_num_seqs=16) == (512 - 16 * each - step, 16 * each + step)
    assert counted("Gemma2", monkeypatch, 1, max_num_seqs=64) == (256, None)
    assert counted("Gemma2", monkeypatch, 1, num_window_pages=20, max_num_seqs=64) == (512 - 20, 20)
    assert counted("Mistral", monkeypatch, 1) == (256, 4 * each + step)
    assert counted("Mistral", monkeypatch, num_pages=40) == (256, 40)
    assert counted("Mistral", monkeypatch, num_pages=300) == (300, 4 * each + step)


def test_numbers_that_cannot_be():
    with pytest.raises(ValueError, match="num_window_pages: got 9, expected at least 10: one sequence needs so many"):
        launch("Gemma2", num_window_pages=9)
    with pytest.raises(ValueError, match="num_window_pages: got 24, expected None: no layer of the model has a window"):
        Engine.from_pretrained(build("Llama"), device="cpu", config=replace(CONFIG, num_window_pages=24))
    with pytest.raises(ValueError, match=r"num_window_pages: no room for 9000000: .* lower num_window_pages"):
        launch("Gemma2", num_pages=None, num_window_pages=9_000_000)
