"""What an engine takes of its machine, and what it shows on a terminal."""

import io
import sys
from dataclasses import replace

import pytest
import torch
from engine_models import build, prompts

from vexact_engine import Engine, EngineConfig, SamplingParams
from vexact_engine.runner import memory

CONFIG = EngineConfig(num_pages=64, page_size=4, max_num_batched_tokens=16, show_progress=False)
PROMPTS = prompts(4, longest=20)
PARAMS = SamplingParams(max_new_tokens=6, seed=1, ignore_eos=True)


def test_the_size_of_the_cache(monkeypatch):
    config = EngineConfig(max_num_seqs=3, page_size=10)
    args = 1000, 95, torch.device("cpu")  # bytes per token, longest sequence
    monkeypatch.setattr(memory, "available_bytes", lambda: 400_000)
    assert memory.default_num_pages(config, *args) == 10  # a quarter of what is there
    monkeypatch.setattr(memory, "available_bytes", lambda: 1 << 40)
    assert memory.default_num_pages(config, *args) == 3 * 10  # no more than all sequences need
    assert memory.default_num_pages(config, 1 << 20, 1 << 20, args[2]) == memory.CPU_MOST // (10 << 20)
    monkeypatch.setattr(memory, "available_bytes", lambda: 39_000)
    with pytest.raises(ValueError, match="a quarter of the 0 MiB available leaves 9750 bytes, a page takes 10000"):
        memory.default_num_pages(config, *args)
    monkeypatch.undo()
    assert 1 << 20 < memory.available_bytes() < 1 << 50
    with Engine.from_pretrained(build("Llama"), config=EngineConfig(max_num_seqs=2)) as engine:
        assert engine.config.num_pages == 2 * 16 and engine.config.max_model_len == 256


@pytest.mark.parametrize("show, terminal", [(None, True), (None, False), (True, False), (False, True)])
def test_progress(show, terminal, monkeypatch):
    screen = io.StringIO()
    screen.isatty = lambda: terminal
    with Engine.from_pretrained(build("Llama"), config=replace(CONFIG, show_progress=show)) as engine:
        monkeypatch.setattr(sys, "stderr", screen)
        engine.generate(PROMPTS, PARAMS)
    drawn = show if show is not None else terminal
    assert bool(screen.getvalue()) == drawn
    if terminal and drawn:
        assert "generating" in screen.getvalue()
