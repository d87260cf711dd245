"""vx.cuda_graph: captures beside other threads that use the same GPU."""

import contextlib
import threading

import pytest
import torch

import vexact_ops as vx
from vexact_ops._core import admit

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible to torch")


@pytest.fixture(autouse=True)
def stream():
    with torch.cuda.stream(vx.cuda_stream()):
        yield


@contextlib.contextmanager
def beside(action):
    """A thread that does this again and again; gives the list of what it raised."""
    stop, raised, went = threading.Event(), [], threading.Event()

    def work():
        while not stop.is_set():
            try:
                action()
            except RuntimeError as error:
                raised.append(error)
            went.set()

    thread = threading.Thread(target=work)
    thread.start()
    assert went.wait(300)
    try:
        yield raised
    finally:
        stop.set()
        thread.join()


def capturing():
    """Captures on a stream of its own."""
    y, other = torch.zeros(10, device="cuda"), vx.cuda_stream()

    def capture():
        with torch.cuda.stream(other):
            vx.cuda_graph(lambda: [y.add_(1) for _ in range(200)])

    with torch.cuda.stream(other):
        y.add_(1)  # loads the kernel
    return capture


def added(launches: int = 3):
    x = torch.zeros(1000, device="cuda")
    x.add_(1)  # loads the kernel
    x.zero_()
    graph = vx.cuda_graph(lambda: x.add_(1))
    for _ in range(launches):
        graph()
    assert x.eq(launches).all()
    return graph, x


def test_a_graph_is_launched_on_the_current_stream_as_often_as_asked():
    added()
    pool = torch.cuda.graph_pool_handle()
    x = torch.arange(4.0, device="cuda")
    made = []
    graphs = [vx.cuda_graph(lambda by=by: made.append(x * by), pool=pool) for by in (2, 3)]
    x.fill_(5)
    for graph, by in zip(graphs, (2, 3)):  # they share memory: one after another
        graph()
        assert made[by - 2].tolist() == [5.0 * by] * 4


def test_a_stream_is_nobody_elses():
    streams = [vx.cuda_stream() for _ in range(40)]
    assert len({s.cuda_stream for s in streams}) == 40
    assert not {s.cuda_stream for s in streams} & {torch.cuda.Stream().cuda_stream for _ in range(100)}
    again = streams.pop().cuda_stream
    assert vx.cuda_stream().cuda_stream == again and vx.cuda_stream("cuda").device.index == 0


def test_on_the_default_stream_it_says_so():
    with torch.cuda.stream(torch.cuda.default_stream()), pytest.raises(ValueError, match="the default one"):
        vx.cuda_graph(lambda: None)


def test_what_run_raises_comes_out_and_nothing_is_left_behind():
    x = torch.ones(3, device="cuda")
    with pytest.raises(RuntimeError, match="captur"):
        vx.cuda_graph(lambda: x.sum().item())
    with pytest.raises(ZeroDivisionError):
        vx.cuda_graph(lambda: (x + 1, 1 / 0))
    assert torch.arange(5).to("cuda").sum().item() == 10
    torch.randn(3, device="cuda")  # the generator does not take itself for capturing
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        later = x + torch.rand(3, device="cuda")
    graph.replay()
    assert later.min() >= 1
    added()


def test_a_thread_that_waits_for_the_device_does_not_stop_captures():
    with beside(torch.cuda.synchronize):
        for _ in range(30):
            try:
                added()
            except RuntimeError as error:
                assert "captures were broken: another thread" in str(error)
    added()
    torch.randn(3, device="cuda")


def test_our_own_wait_disturbs_no_capture():
    with beside(vx.synchronize) as raised:
        for _ in range(30):
            added()
    assert not raised


def test_graphs_are_launched_while_another_thread_captures():
    graph, x = added()
    with beside(capturing()) as raised:
        for _ in range(2000):
            graph()
    assert not raised
    assert x.eq(2003).all()


def test_shapes_are_settled_while_another_thread_captures():
    """The bits of a shape that is verified, timed and chosen beside captures; neither breaks the other."""
    g = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(rows, 328, generator=g).to("cuda", torch.bfloat16) for rows in (9, 264))
    with beside(capturing()) as raised:
        whole = vx.linear(x, weight)
        alone = torch.cat([vx.linear(x[i : i + 1], weight) for i in range(9)])
    assert not raised
    assert torch.equal(whole.view(torch.int16), alone.view(torch.int16))


def test_no_graph_where_kernels_would_have_been_verified(monkeypatch):
    """Canonical ones would be in it for good: who asks is told, verifies them outside, and has his graph then."""
    proposal, x = propose(), torch.ones(3, device="cuda")
    monkeypatch.setattr(admit, "_decisions", {})
    x.add_(1)  # loads the kernel

    def run():
        admit.admitted(proposal, x.device)
        x.add_(1)

    assert vx.cuda_graph(run, if_settled=True) is None
    assert vx.cuda_graph(run) is not None
    run()
    graph = vx.cuda_graph(run, if_settled=True)
    x.zero_()
    graph()
    assert x.eq(1).all()


def propose():
    same = (admit.Candidate(name, lambda x: x + x, "v1") for name in ("same", "canonical"))
    return admit.Proposal("twice", [next(same)], next(same), lambda: [(torch.ones(3, device="cuda"),)], ahead=False)
