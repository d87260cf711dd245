"""patch.aten: stray products and sums have one order, whoever calls them; what is left is said, and no trace is."""

import threading

import pytest
import torch
import torch.nn.functional as F
from conftest import devices
from families import alone, gradients, pack, sequences, tiny, world
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

import vexact_ops as vx
from vexact_ops.testing import assert_bitwise, cancelling, check_repeatable, check_rows

KINDS = pytest.mark.parametrize("device,dtype", devices())
DEVICES = pytest.mark.parametrize("device,dtype", devices(torch.bfloat16))


def random(*shape, seed=0, device="cpu", dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def calls(handle):
    return {(row.name, row.replacement): row.calls for row in handle.report()}


# What the stock operations do, and what becomes of it


def stray_mm(device):
    """A product whose stock bits depend on the number of rows: on a GPU where cuBLAS splits k for few of them."""
    if device == "cpu":
        return random(64, 512, seed=1), random(512, 300, seed=2)
    x, w = cancelling(64, 4096, 4096, seed=1, device=device)
    return x, w.t()


def batched(f, x):
    """f of all rows, and of the rows in pieces."""
    return f(x), torch.cat([f(part) for part in x.split([1, 3, 8, len(x) - 12])])


@DEVICES
def test_a_stock_product_sees_the_batch_and_a_routed_one_does_not(device, dtype):
    x, w = stray_mm(device)
    with pytest.raises(AssertionError, match="differ"):
        assert_bitwise(*batched(lambda t: t @ w, x))
    with vx.patch.aten() as handle:
        assert_bitwise(*batched(lambda t: t @ w, x))
        check_rows(lambda t: t @ w, x)
    assert calls(handle)[("aten.mm", "linear")] > 5
    with pytest.raises(AssertionError, match="differ"):
        assert_bitwise(*batched(lambda t: t @ w, x))


ROWWISE = {  # a function of rows whose elements must not see each other; x (R, 64)
    "linear": lambda x, w, c: F.linear(x, w, c),
    "linear 3d": lambda x, w, c: F.linear(x[:, None].expand(-1, 3, -1), w, c),
    "mm": lambda x, w, c: x @ w.t(),
    "mm by rows": lambda x, w, c: x @ w.t().contiguous(),
    "addmm": lambda x, w, c: torch.addmm(c, x, w.t(), beta=0.5, alpha=2.0),
    "mv": lambda x, w, c: torch.mv(x, w[0]),
    "einsum": lambda x, w, c: torch.einsum("rk,nk->rn", x, w),
    "bmm": lambda x, w, c: torch.bmm(x.view(-1, 4, 16), w[:, :16].t().expand(len(x), -1, -1)),
    "matmul": lambda x, w, c: torch.matmul(x.view(-1, 2, 2, 16), w[:, :16].t()),
    "baddbmm": lambda x, w, c: torch.baddbmm(c, x.view(-1, 4, 16), w[:, :16].t().expand(len(x), -1, -1), alpha=0.25),
    "log_softmax": lambda x, w, c: torch.log_softmax(x, -1),
    "log_softmax of columns": lambda x, w, c: torch.log_softmax(x.view(-1, 8, 8), 1),
    "log_softmax in fp32": lambda x, w, c: torch.log_softmax(x, -1, dtype=torch.float32),
    "mean": lambda x, w, c: x.mean(-1),
    "mean of two": lambda x, w, c: x.view(-1, 2, 8, 4).mean((1, 3), keepdim=True),
    "sum": lambda x, w, c: x.sum(1),
    "sum in fp32": lambda x, w, c: x.sum(1, dtype=torch.float32),
    "cross_entropy": lambda x, w, c: F.cross_entropy(x, torch.full_like(x[:, 0], 5).long(), reduction="none"),
}


@KINDS
@pytest.mark.parametrize("name", ROWWISE)
def test_rows_stand_alone_and_values_are_right(name, device, dtype):
    f = ROWWISE[name]
    x, w, c = (random(*s, seed=i, device=device, dtype=dtype) for i, s in enumerate([(13, 64), (20, 64), (20,)]))
    exact = f(x.double(), w.double(), c.double())
    stock = f(x, w, c)
    with vx.patch.aten() as handle:
        y = f(x, w, c)
        check_rows(lambda t: f(t, w, c), x)
        check_repeatable(lambda: f(x, w, c), threads=(1,))
    assert y.dtype == stock.dtype and y.stride() == stock.stride()
    scale = exact.abs().max().item()
    worst = (y.double() - exact).abs().max().item()
    assert worst <= 2 * (stock.double() - exact).abs().max().item() + 1e-6 * scale
    assert any(row.replacement for row in handle.report())
    assert all("nll_loss" in row.name or row.replacement for row in handle.report())


@KINDS
def test_gradients_of_rows_have_the_same_bits(device, dtype):
    w = random(20, 64, seed=1, device=device, dtype=dtype)

    def backward(x):
        x = x.detach().requires_grad_()
        y = torch.log_softmax(F.linear(x, w), -1).mean(-1) + torch.bmm(x.view(-1, 4, 16), x.view(-1, 16, 4)).sum((1, 2))
        y.sum().backward()
        return x.grad

    with vx.patch.aten() as handle:
        check_rows(backward, random(11, 64, seed=3, device=device, dtype=dtype))
    expected = {"aten.mm", "aten.bmm", "aten._log_softmax", "aten._log_softmax_backward_data", "aten.mean", "aten.sum"}
    assert {row.name for row in handle.report()} == expected
    x = random(11, 64, seed=3, device=device, dtype=dtype)
    with vx.patch.aten():
        ours = backward(x)
    w = w.double()
    want = backward(x.double())
    assert (ours.double() - want).norm() <= {torch.float32: 1e-5}.get(dtype, 2e-2) * want.norm()


@KINDS
def test_variants_that_write_into_an_argument(device, dtype):
    a, b, c = (random(*s, seed=i, device=device, dtype=dtype) for i, s in enumerate([(5, 16), (16, 7), (5, 7)]))
    with vx.patch.aten() as handle:
        expected = a @ b
        out = torch.empty_like(c)
        assert torch.mm(a, b, out=out) is out
        assert_bitwise(out, expected)
        plus = torch.addmm(c, a, b)
        assert_bitwise(c.clone().addmm_(a, b), plus)
        assert_bitwise(torch.sum(a, 1, out=a.new_empty(5)), a.sum(1))
        assert_bitwise(torch.addmm(torch.full_like(c, torch.nan), a, b, beta=0), expected)
        assert_bitwise(a[0] @ b, expected[0])
        assert_bitwise(torch.dot(a[0], b[:, 0]), expected[0, 0])
        assert {row.name for row in handle.report() if not row.replacement} == set()


@DEVICES
def test_composite_operations_under_inference_mode(device, dtype):
    """There, linear and matmul arrive whole."""
    x, w = random(9, 64, device=device, dtype=dtype), random(20, 64, seed=1, device=device, dtype=dtype)
    with vx.patch.aten() as handle, torch.inference_mode():
        check_rows(lambda t: F.linear(t, w), x)
        assert {row.replacement for row in handle.report()} == {"linear"}


def test_what_is_not_routed_is_reported():
    x = torch.randn(6, 8)
    expected = x.double() @ x.double().t(), torch.softmax(x, -1), x.long() @ x.long().t(), x.half().mean(-1)
    with vx.patch.aten() as handle:
        got = x.double() @ x.double().t(), torch.softmax(x, -1), x.long() @ x.long().t(), x.half().mean(-1)
        _ = (x + 1) * 2, x[0], x.clone(), torch.randn(3)
        nothing = x.new_empty(3, 0).log_softmax(-1)
    assert_bitwise(got, expected)
    assert nothing.shape == (3, 0)
    notes = {(row.name, row.note) for row in handle.report()}
    assert notes == {
        ("aten.mm", "stock: float64 on cpu"),
        ("aten.mean", "stock: float16 on cpu"),
        ("aten._softmax", "stock: its bits may depend on the batch"),
        ("aten._log_softmax", "stock: nothing to reduce"),
    }
    lines = str(handle.report()).splitlines()
    assert lines[0].split() == ["operation", "calls", "aligned", "op", "note"] and len(lines) == 5


# Whole models


class Unknown(nn.Module):
    """A decoder of nobody's making: eager attention, a norm and a feed-forward block spelled out."""

    def __init__(self, n=64, heads=4, vocabulary=61):
        super().__init__()
        self.embed, self.heads = nn.Embedding(vocabulary, n), heads
        self.qkv, self.out = nn.Linear(n, 3 * n), nn.Linear(n, n)
        self.up, self.down = nn.Linear(n, 4 * n), nn.Linear(4 * n, n)

    def norm(self, x):
        return x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-6)

    def forward(self, ids):
        x = self.embed(ids)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        scores = torch.relu(q @ k.mT).tril()
        x = x + self.out((scores / (1 + scores.sum(-1, keepdim=True)) @ v).transpose(1, 2).flatten(2))
        x = x + self.down(torch.relu(self.up(self.norm(x))))
        return (x @ self.embed.weight.t()).log_softmax(-1)


@KINDS
def test_a_model_nobody_knows(device, dtype):
    torch.manual_seed(0)
    model = Unknown().to(device, dtype)
    ids = torch.randint(0, 61, (7, 12), generator=torch.Generator().manual_seed(1)).to(device)

    def rows(some):
        return model(some).detach()

    with vx.patch.aten() as handle:
        check_rows(rows, ids)
        y = model(ids)
        first = gradients(model, y.sum())
        assert_bitwise(list(gradients(model, model(ids).sum()).values()), list(first.values()))
    assert {row.name for row in handle.report() if not row.replacement} <= {"aten.embedding_dense_backward", "aten.pow"}
    stock = model(ids)
    exact = model.double()(ids)
    assert (y.double() - exact).norm() <= 2 * (stock.double() - exact).norm()


@KINDS
def test_a_stock_decoder_of_transformers(device, dtype):
    """A sequence alone and in a batch of its length. Not more: its softmax, and on a CPU its exponentials, stay stock,
    which see the length and the place in memory."""
    model = tiny("llama", dtype, device=device)
    seqs = sequences((16, 16, 16), device=device)
    with vx.patch.aten() as handle:
        batch = model(torch.stack(seqs), use_cache=False).logits
        assert_bitwise(list(batch), alone(model, seqs))
    assert calls(handle)[("aten.mm", "linear")] > 10


@DEVICES
def test_around_a_patched_model_nothing_changes(device, dtype):
    model = tiny("qwen3", dtype, device=device).train()
    ids, cu, _ = pack(sequences(device=device))

    def run():
        values = handle.logprobs(ids, cu_seqlens=cu)
        return values.detach(), *gradients(model, values.sum()).values()

    with vx.patch.hf(model) as handle:
        expected = run()
        with vx.patch.aten() as outer:
            assert_bitwise(run(), expected)
    assert all(row.name == "aten.sum" or not row.replacement for row in outer.report())


@DEVICES
def test_distributed_tensors_and_sharded_models(device, dtype):
    """What a tensor subclass is made of is routed, once it gets down to plain tensors."""
    x, w = random(12, 512, device=device, dtype=dtype), random(512, 300, seed=1, device=device, dtype=dtype)
    torch.manual_seed(0)
    model, ids = Unknown().to(device, dtype), torch.arange(24, device=device).view(2, 12)
    with vx.patch.aten(), world(device) as mesh:
        expected, values = x @ w, model(ids)
        with vx.patch.aten() as handle:
            got = distribute_tensor(x, mesh, [Replicate()]) @ distribute_tensor(w, mesh, [Shard(1)])
            assert_bitwise(got.full_tensor(), expected)
        assert calls(handle)[("aten.mm", "linear")] == 1
        grads = list(gradients(model, values.sum()).values())
        fully_shard(model, mesh=mesh)
        sharded = model(ids)
        assert_bitwise(sharded, values)
        sharded.sum().backward()
        assert_bitwise([p.grad.full_tensor() for p in model.parameters()], grads)


# The object


def test_nested_handles_undo_in_any_order():
    x, w = stray_mm("cpu")
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
        handles = [vx.patch.aten() for _ in range(3)]
        for count, index in enumerate(order):
            assert_bitwise(*batched(lambda t: t @ w, x))
            handles[index].undo()
            handles[index].undo()
            assert sum(row.calls for row in handles[index].report()) == 5 * (count + 1)
        assert not torch._C._len_torch_dispatch_stack()
        with pytest.raises(AssertionError, match="differ"):
            assert_bitwise(*batched(lambda t: t @ w, x))


def test_an_exception_inside_the_block_undoes_the_patch():
    with pytest.raises(KeyError, match="mine"), vx.patch.aten():
        raise KeyError("mine")
    assert not torch._C._len_torch_dispatch_stack()
    assert not torch._C._len_torch_dispatch_stack()


def test_stock_s_own_errors():
    a, b = torch.randn(3, 4), torch.randn(5, 6)
    with vx.patch.aten():
        with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
            a @ b
        with pytest.raises(RuntimeError, match="expanded size of the tensor"):
            torch.addmm(torch.ones(2, 2), a, b[:4])
        with pytest.raises(RuntimeError, match="batch"):
            torch.bmm(a[None], b.expand(2, 5, 6))
        with pytest.raises(IndexError, match="Dimension out of range"):
            a.sum(2)
        with pytest.raises(RuntimeError, match="appears multiple times"):
            a.mean((0, -2))
        with pytest.raises(RuntimeError, match="dtype"):
            a @ b[:4].double()
    assert torch.isfinite(torch.addmm(torch.ones(1, 6), a, b[:4])).all()


def test_a_mode_that_was_entered_later_has_to_go_first():
    class Other(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    handle = vx.patch.aten()
    with Other():
        with pytest.raises(RuntimeError, match="a dispatch mode that was entered after the patch is active"):
            handle.undo()
        assert_bitwise(*batched(lambda t: t @ stray_mm("cpu")[1], stray_mm("cpu")[0]))
    handle.undo()
    assert not torch._C._len_torch_dispatch_stack()


def test_threads_have_their_own_patch():
    x, w = stray_mm("cpu")
    steps, found = [threading.Event() for _ in range(3)], {}

    def other():
        steps[0].wait(300)  # the first thread is patched, this one is not
        found["stock"] = torch.equal(*batched(lambda t: t @ w, x))
        handle = vx.patch.aten()
        found["patched"] = torch.equal(*batched(lambda t: t @ w, x))
        steps[1].set()
        steps[2].wait(300)  # the first thread has undone its patch
        found["still patched"] = torch.equal(*batched(lambda t: t @ w, x))
        try:
            mine.undo()
        except RuntimeError as error:
            found["error"] = str(error)
        handle.undo()

    thread = threading.Thread(target=other)
    thread.start()
    mine, again = vx.patch.aten(), vx.patch.aten()
    steps[0].set()
    steps[1].wait(300)
    again.undo()
    flags = _python_dispatch.is_in_torch_dispatch_mode()
    mine._thread, owner = -1, mine._thread  # as if it were another's, to be refused there
    steps[2].set()
    thread.join(300)
    mine._thread = owner
    mine.undo()
    assert found == {
        "stock": False,
        "patched": True,
        "still patched": True,
        "error": "undo: this patch belongs to another thread: undo it there",
    }
    assert flags and not _python_dispatch.is_in_torch_dispatch_mode()
    assert not torch._C._len_torch_dispatch_stack()


def test_flags_of_the_process_come_back_in_any_order():
    """Two threads that leave in the order in which they came, which a stack of flags would not survive."""
    entered, leave = threading.Event(), threading.Event()

    def other():
        with vx.patch.aten():
            entered.set()
            leave.wait(300)

    first = vx.patch.aten()
    thread = threading.Thread(target=other)
    thread.start()
    entered.wait(300)
    first.undo()
    assert _python_dispatch.is_in_torch_dispatch_mode(), "the other thread is still patched"
    leave.set()
    thread.join(300)
    assert not _python_dispatch.is_in_torch_dispatch_mode()


@DEVICES
def test_a_backward_pass_in_autograd_s_own_threads(device, dtype):
    """On a GPU it runs in another thread than the caller's: the patch goes with it."""
    x, w = random(9, 64, device=device, dtype=dtype), random(20, 64, seed=1, device=device, dtype=dtype)
    w.requires_grad_()
    y = F.linear(x, w).sum()
    with vx.patch.aten() as handle:
        y.backward()
    assert ("aten.mm", "linear") in calls(handle)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_functions_run_uncompiled(backend):
    x, w = stray_mm("cpu")

    @torch.compile(backend=backend)
    def f(t):
        return torch.relu(t @ w).sum(-1)

    try:
        f(x)
        with vx.patch.aten() as handle:
            assert_bitwise(*batched(f, x))
        assert calls(handle) == {("aten.mm", "linear"): 5, ("aten.sum", "sum"): 5}
    finally:
        torch._dynamo.reset()
