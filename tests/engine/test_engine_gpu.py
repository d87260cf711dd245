"""What is particular to the engine on a GPU: memory, waiting, devices. Its bits are tested with the CPU's."""

from dataclasses import replace

import pytest
import torch
from engine_models import VOCAB, bits, build, check_idle, prompts

from vexact_engine import Engine, EngineConfig, SamplingParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible to torch")
CONFIG = EngineConfig(num_pages=64, page_size=16, max_num_seqs=8, max_num_batched_tokens=32, show_progress=False)
PROMPTS = prompts(5)
PARAMS = SamplingParams(max_new_tokens=6, seed=1, ignore_eos=True, num_top_logprobs=2)


def launch(config=CONFIG, device="cuda", family="Qwen3", **options):
    return Engine.from_pretrained(build(family, device=device, **options), device=device, config=config)


def test_what_other_streams_have_begun_comes_first():
    """Weights that are still being written when the engine is made, and new ones when they are handed over: both by
    a stream that is far behind."""
    with launch() as engine:
        expected = [bits(c) for c in engine.generate(PROMPTS, PARAMS)]
    other = build("Qwen3", seed=1, device="cuda")
    with Engine.from_pretrained(other, device="cuda", config=CONFIG) as engine:
        expected_new = [bits(c) for c in engine.generate(PROMPTS, PARAMS)]

    def slowly(function):
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(200_000_000)  # a tenth of a second
            return function()

    late = build("Qwen3", device="cuda")
    right = {name: value.clone() for name, value in late.state_dict().items()}
    with torch.no_grad():
        for value in late.parameters():
            value.zero_()
    torch.cuda.synchronize()

    def made():
        late.load_state_dict(right)
        return Engine.from_pretrained(late, device="cuda", config=CONFIG)

    with slowly(made) as engine:
        assert [bits(c) for c in engine.generate(PROMPTS, PARAMS)] == expected
        new = {name: torch.zeros_like(value) for name, value in right.items()}
        torch.cuda.synchronize()

        def handed():
            for name, value in other.state_dict().items():
                new[name].copy_(value)
            engine.update_weights(new, numerics=engine.numerics())
            for value in new.values():
                value.zero_()  # the sources are the caller's again

        slowly(handed)
        assert [bits(c) for c in engine.generate(PROMPTS, PARAMS)] == expected_new
        check_idle(engine)


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize(
    "family,path",
    [
        ("Qwen3", "fused"),
        ("Qwen3", "patched"),
        ("Qwen3Moe", "fused"),
        ("DeepseekV3", "patched"),
    ],
)
def test_a_launch_waits_for_nothing(family, path, eager, monkeypatch):
    """From the step on its way to the device to its draws on their way back, nothing makes the host wait."""
    if path == "patched":
        monkeypatch.setattr("vexact_engine.runner.forward.fuse", lambda *args: (None, "for this test"))
    with launch(replace(CONFIG, enforce_eager=eager), family=family) as engine:
        assert engine.path.startswith(path)
        expected = [bits(c) for c in engine.generate(PROMPTS, PARAMS)]  # compiles and verifies kernels, which wait
        runner, steps = engine._worker._runner, 0
        begin = runner.launch

        def strict(step):
            nonlocal steps
            steps += 1
            torch.cuda.set_sync_debug_mode("error")
            try:
                return begin(step)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        monkeypatch.setattr(runner, "launch", strict)
        assert [bits(c) for c in engine.generate(PROMPTS, PARAMS)] == expected
        assert steps >= PARAMS.max_new_tokens


def test_the_mode_that_finds_waiting_finds_it():
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            torch.ones(3, device="cuda").tolist()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_cache_takes_the_share_of_memory_that_is_left(monkeypatch):
    _, total = torch.cuda.mem_get_info()
    # other processes come and go on a shared GPU: count this one alone
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *device: (total - torch.cuda.memory_reserved(), total))
    torch.cuda.empty_cache()
    share = (torch.cuda.memory_reserved() + (1 << 30)) / total
    config = replace(CONFIG, num_pages=None, gpu_memory_utilization=share, max_num_seqs=1 << 20)
    with launch(config, max_position_embeddings=1 << 15) as engine:
        page = 2 * 2 * 2 * 16 * 16 * 2  # layers, k and v, heads, head dim, page size, bytes
        taken = engine.config.num_pages * page
        assert (1 << 28) < taken < (1 << 30)  # less what weights, kernels and a step take
        assert sum(c.nbytes for part in engine._worker._runner.buffers.caches for c in part) == taken
        done = engine.generate(PROMPTS, PARAMS)
        check_idle(engine)
    with launch() as engine:
        assert [bits(c) for c in engine.generate(PROMPTS, PARAMS)] == [bits(c) for c in done]
    with pytest.raises(ValueError, match=r"num_pages: no room for a KV cache: gpu_memory_utilization=1e-06 of \d+ MiB"):
        launch(replace(config, gpu_memory_utilization=1e-6))


def test_bad_requests_are_refused_before_they_reach_the_gpu():
    with launch() as engine:
        good = bits(engine.generate([PROMPTS[0]], PARAMS)[0])
        bad = [[VOCAB], [-1], [], [5] * 300, [2**40]]
        done = engine.generate([PROMPTS[0], *bad, PROMPTS[0]], PARAMS)
        assert [c.finish_reason for c in done[1:-1]] == ["error"] * len(bad)
        assert all(str(p[0]) in c.error for p, c in zip(bad, done[1:-1]) if len(p) == 1)
        assert bits(done[0]) == bits(done[-1]) == good
        check_idle(engine)
    torch.cuda.synchronize()


def test_weights_that_are_no_numbers_fail_their_requests_and_the_engine_goes_on():
    with launch() as engine:
        good = engine.model.state_dict()
        good = {name: tensor.clone() for name, tensor in good.items()}
        expected = [bits(c) for c in engine.generate(PROMPTS, PARAMS)]
        nan = {"model.norm.weight": torch.full_like(good["model.norm.weight"], torch.nan)}
        engine.update_weights(good | nan, numerics=engine.numerics())
        done = engine.generate(PROMPTS, PARAMS)
        assert all("not finite numbers" in c.error for c in done)
        from_the_cpu = {name: tensor.cpu() for name, tensor in good.items()}
        engine.update_weights(from_the_cpu, numerics=engine.numerics())
        assert [bits(c) for c in engine.generate(PROMPTS, PARAMS)] == expected


def test_a_model_that_is_elsewhere_is_refused():
    with pytest.raises(ValueError, match="device: the given Qwen3ForCausalLM is on cuda, expected cpu"):
        Engine.from_pretrained(build("Qwen3", device="cuda"), device="cpu", config=CONFIG)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason=f"needs 2 GPUs, torch sees {torch.cuda.device_count()}")
def test_another_gpu_than_the_current_one():
    with launch() as first, launch(device="cuda:1") as second:
        assert second.device.index == 1 and torch.cuda.current_device() == 0
        got = [[bits(c) for c in engine.generate(PROMPTS, PARAMS)] for engine in (first, second)]
        assert got[0] == got[1]
