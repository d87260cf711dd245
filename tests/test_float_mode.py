"""What an op computes on a CPU does not depend on the floating-point mode of its caller's thread or of a worker.

That every op has its golden bits in another mode is in test_golden.py."""

import threading

import pytest
import torch

import vexact_ops as vx
from vexact_ops._core import native
from vexact_ops.testing import assert_bitwise

pytestmark = pytest.mark.skipif(native.unavailable() is not None, reason="needs the extension")
FLUSH, UP, DOWN, TO_ZERO = 0x8040, 0x4000, 0x2000, 0x6000
MODES = {"flush": FLUSH, "up": UP, "down": DOWN, "to-zero": TO_ZERO, "flush-up": FLUSH | UP}


@pytest.fixture
def set_mode():
    found = native.float_mode()
    if found == 0:
        pytest.skip("this processor's mode is not ours to set")
    yield lambda bits: native.ops().float_mode(native.DEFAULT_FLOAT_MODE | bits)
    native.ops().float_mode(found)


def subnormal_rows(rows, n):
    return (torch.arange(1, n + 1) * 3e-41).repeat(rows, 1)


OPS = {
    "linear": lambda x: vx.linear(x, x.new_ones(16, x.shape[1])),
    "rmsnorm": lambda x: vx.rmsnorm(x, x.new_ones(x.shape[1]), 1e-38),
    "silu_mul": lambda x: vx.silu_mul(x, torch.ones_like(x)),
    "mean": lambda x: vx.mean(x),
    "log_softmax": lambda x: vx.log_softmax(x),
    "linear_logprobs": lambda x: vx.linear_logprobs(x, x.new_full((16, x.shape[1]), 1e38), torch.zeros(len(x)).long()),
}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_equal_rows_have_one_result_where_the_caller_flushes_subnormals(op, dtype):
    """By torch's own switch, which sets the calling thread alone: rows went to it or to a worker."""
    x = subnormal_rows(512, 96).to(dtype)
    want = OPS[op](x)
    before, threads = native.float_mode(), torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        assert torch.set_flush_denormal(True)
        found = OPS[op](x)
    finally:
        native.ops().float_mode(before)
        torch.set_num_threads(threads)
    assert len(torch.unique(found.view(torch.uint8).view(512, -1), dim=0)) == 1
    assert_bitwise(found, want)


def test_this_can_fail():
    """torch's own sum of the same rows differs, so what the test above sets is felt."""
    x, before = subnormal_rows(512, 96), native.float_mode()
    want = x.sum(1)
    try:
        assert torch.set_flush_denormal(True)
        found = x.sum(1)
    finally:
        native.ops().float_mode(before)
    assert not torch.equal(found, want)


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_changes_nothing_and_is_kept(set_mode, mode):
    x, target = torch.linspace(-3, 3, 40 * 96).view(40, 96), torch.arange(40)
    weight, small = torch.linspace(-1, 1, 64 * 96).view(64, 96), subnormal_rows(9, 33)
    dloss = torch.tensor(1e-36)  # divided by the tokens and multiplied with probabilities, it is subnormal

    def run():
        leaf = x.clone().requires_grad_()
        loss = vx.linear_cross_entropy(leaf, weight, target)
        (dx,) = torch.autograd.grad(loss, leaf, dloss)
        tenth = vx.linear_logprobs(x, weight, target, temperature=0.1)  # not an fp32 number
        drawn = vx.sample(vx.linear_logits(x, weight), 7, 3, temperature=0.3, top_p=0.7, min_p=0.1)
        return loss, dx, tenth, drawn, vx.rmsnorm(x, weight[0], 1.1e-6), vx.mean(x), vx.mean(small)

    want = run()
    set_mode(MODES[mode])
    found = run()
    assert native.float_mode() == native.DEFAULT_FLOAT_MODE | MODES[mode], "the caller's mode is the caller's"
    set_mode(0)
    assert_bitwise(found, want)


def test_no_thread_of_the_pool_keeps_another_mode(set_mode):
    """A thread that starts torch's workers hands its mode on to them."""
    x, found = subnormal_rows(4096, 64), {}

    def run(name, bits):
        native.ops().float_mode(native.DEFAULT_FLOAT_MODE | bits)
        found[name] = vx.mean(x)

    for name, bits in (("first", FLUSH), ("second", 0), ("third", FLUSH | TO_ZERO)):
        thread = threading.Thread(target=run, args=(name, bits))
        thread.start()
        thread.join()
    assert_bitwise(found["first"], vx.mean(x))
    assert_bitwise(found["second"], found["third"])
    assert bool((found["first"] != 0).all())


def test_scales_of_attention_are_fp32_numbers_in_every_mode():
    """1 / sqrt(D) is left to Python: an error in its last bit must not reach fp32."""
    scale = torch.arange(1, 1025, dtype=torch.float64) ** -0.5
    for direction in (0.0, 1.0):
        assert torch.equal(scale.nextafter(torch.full_like(scale, direction)).float(), scale.float())


def test_the_mode_lasts_for_a_block_and_ends_with_it(set_mode):
    set_mode(FLUSH)
    with pytest.raises(KeyError), native.default_float_mode():
        assert native.float_mode() == native.DEFAULT_FLOAT_MODE
        raise KeyError
    assert native.float_mode() == native.DEFAULT_FLOAT_MODE | FLUSH
