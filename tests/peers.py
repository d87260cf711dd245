"""A process of test_peers.py: one rank, and what comes of its gathers.

python tests/peers.py RANK SIZE DEVICE FOLDER WHAT
"""

import sys
import time
from pathlib import Path

import torch

import vexact_ops as vx
from vexact_ops.fused_moe import cuda
from vexact_ops.rmsnorm import gather


def exchange_in(folder: Path, rank: int, size: int):
    """Through files: no rank needs torch.distributed."""
    calls = iter(range(100))

    def exchange(data: bytes) -> list[bytes]:
        call = next(calls)
        part = folder / f"{call}.{rank}.part"
        part.write_bytes(data)
        part.rename(folder / f"{call}.{rank}")
        every = [folder / f"{call}.{other}" for other in range(size)]
        end = time.monotonic() + 120
        while not all(path.exists() for path in every):
            if time.monotonic() > end:
                raise TimeoutError(f"exchange {call}: not all are there")
            time.sleep(0.01)
        return [path.read_bytes() for path in every]

    return exchange


def values(rank: int, rows: int, columns: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(1000 * seed + rank)
    bits = torch.randint(256, (rows, columns * dtype.itemsize), dtype=torch.uint8, generator=made)
    return bits.view(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def gathers(peers, rank: int, size: int, device) -> None:
    shapes = [
        (1, 2048),
        (128, 2048),
        (129, 2048),
        (256, 2048),
        (5, 3),
        (64, 1),
        (1, 100_000),
        (1500, 4096),
        (0, 8),
        (3, 37),
    ]
    for seed, (rows, columns) in enumerate(shapes * 3):
        for dtype in (torch.bfloat16, torch.float32, torch.int64, torch.uint8):
            own = values(rank, rows, columns, dtype, seed).to(device)
            wanted = torch.cat([values(r, rows, columns, dtype, seed) for r in range(size)], 1)
            for packed in (False, True) if columns * dtype.itemsize % 16 == 0 else (False,):
                assert same(peers.gather(own, packed=packed).cpu(), wanted), (rows, columns, dtype, packed)
    shifted = torch.zeros(1 + 4 * 6, dtype=torch.bfloat16, device=device)[1:].view(4, 6)  # off 4-byte boundaries
    shifted.fill_(rank)
    assert same(peers.gather(shifted).cpu(), torch.arange(size).repeat_interleave(6).expand(4, -1).bfloat16())
    shifted = torch.full((1 + 4 * 8,), rank, dtype=torch.bfloat16, device=device)[1:].view(4, 8)
    assert same(
        peers.gather(shifted, packed=True).cpu(), torch.arange(size).repeat_interleave(8).expand(4, -1).bfloat16()
    )
    many(peers, rank, size, device)
    took = peers.race(rounds=1)
    words = [sum(1 << which for which in peers._packed), len(took)]
    agreed = peers.gather(torch.tensor([words], dtype=torch.int64, device=device), packed=False)
    assert agreed.view(-1).tolist() == words * size
    stream = vx.cuda_stream(device)
    with torch.cuda.stream(stream):
        x = torch.zeros(33, 64, dtype=torch.float32, device=device)
        peers.gather(x)
        found: list = []

        def run():
            found[:] = [peers.gather(peers.gather(x))]

        graph = vx.cuda_graph(run)
        for turn in range(7):
            x.copy_(values(rank, 33, 64, torch.float32, turn))
            graph()
            stream.synchronize()
            once = torch.cat([values(r, 33, 64, torch.float32, turn) for r in range(size)], 1)
            assert same(found[0].cpu(), once.repeat(1, size)), turn


def many(peers, rank: int, size: int, device) -> None:
    """More often than a flag of packed lines counts to, each time other columns, in a graph and beside it, more of them
    than have lines at once."""
    stream = vx.cuda_stream(device)
    with torch.cuda.stream(stream):
        x = torch.empty(9, 1024, dtype=torch.int32, device=device)
        wide = torch.full((600, 1 << 14), rank, dtype=torch.uint8, device=device)
        peers.gather(x, packed=True)
        found = torch.empty(200, 9, size * 1024, dtype=torch.int32, device=device)

        def run():
            for i in range(200):
                x.add_(1)
                found[i].copy_(peers.gather(x, packed=True))

        graph, counted = vx.cuda_graph(run), torch.arange(1, 201, dtype=torch.int32, device=device).view(-1, 1, 1)
        ranks = torch.arange(size, dtype=torch.int32, device=device).repeat_interleave(1024)
        for turn in range(4):
            x.fill_(turn - 2 + (rank << 24))
            graph()
            whole = peers.gather(wide, packed=True)
            stream.synchronize()
            assert torch.equal(found, (turn - 2 + counted + (ranks << 24)).expand_as(found)), turn
            assert torch.equal(whole, ranks[::1024].repeat_interleave(1 << 14).to(torch.uint8).expand_as(whole)), turn


def sent(peers, rank: int, size: int, device) -> None:
    """What is sent and received is what one rank computes of it all, whoever sends; in graphs too."""
    g = torch.Generator().manual_seed(1)

    def new(*shape, dtype=torch.bfloat16) -> torch.Tensor:
        """Alike on all ranks."""
        return torch.randn(shape, generator=g, dtype=torch.float32).to(dtype).to(device)

    def own(x: torch.Tensor, dim: int) -> torch.Tensor:
        return x.chunk(size, dim)[rank].contiguous()

    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for rows, wide in ((1, 96), (5, 768), (64, 768), (131, 6144), (3, 12288), (300, 96), (700, 6144)):
            x, residual, weight = new(rows, wide, dtype=dtype), new(rows, wide, dtype=dtype), new(wide, dtype=dtype)
            assert same(peers.receive(own(x, 1)), x), (rows, wide, dtype)
            for style in ("llama", "gemma"):
                found = vx.rmsnorm_gather(own(x, 1), weight, 1e-6, residual, peers, style=style)
                expected = vx.rmsnorm(x, weight, 1e-6, residual, style=style)
                assert all(map(vx.same_bits, found, expected)), (rows, wide, dtype, style)
    peers._packed = frozenset(range(64))  # as if all classes had won: normed where packed lines of one width come
    for dtype in (torch.bfloat16, torch.float16):
        wide = 4096 if size == 2 else 4080
        for rows in (65, 200, 300, 131):
            x, residual, weight = new(rows, wide, dtype=dtype), new(rows, wide, dtype=dtype), new(wide, dtype=dtype)
            for style in ("llama", "gemma", "llama"):
                assert peers.norms(rows, wide // size, dtype)
                found = vx.rmsnorm_gather(own(x, 1), weight, 1e-6, residual, peers, style=style)
                expected = vx.rmsnorm(x, weight, 1e-6, residual, style=style)
                assert all(map(vx.same_bits, found, expected)), (rows, wide, dtype, style)
                assert not peers.norms(rows, wide // size - 8, dtype)
            assert same(peers.receive(own(x, 1)), x)
    packed_norms = [verdict for key, verdict in gather._verdicts.items() if key[0] is gather._verify_packed]
    assert packed_norms and all(packed_norms)
    again(peers, own, new, wide)
    peers._packed = frozenset()
    hidden, width = 768, 1536
    o, up, down, norm = new(hidden, hidden), new(2 * width, hidden), new(hidden, width), new(hidden)
    bias, gates = new(hidden), torch.cat([own(half, 0) for half in up.chunk(2)])

    def whole(x, residual):
        h, residual = vx.rmsnorm(vx.linear(x, o, bias), norm, 1e-6, residual)
        return vx.rmsnorm(vx.linear(vx.linear_silu_mul(h, up), down), norm, 1e-6, residual)

    def ranked(x, residual):
        rows = own(o, 0), own(bias, 0)
        if rank == 1:  # who has not sent what it computes sends it where it receives the others'
            product = vx.linear(peers.receive(own(x, 1)), *rows)
        else:
            product = vx.linear_gather_send(own(x, 1), *rows, peers)
        h, residual = vx.rmsnorm_gather(product, norm, 1e-6, residual, peers)
        h = vx.linear_silu_mul_send(h, gates, None, peers)
        return vx.rmsnorm_gather(vx.linear_gather_send(h, own(down, 0), None, peers), norm, 1e-6, residual, peers)

    stream = vx.cuda_stream(device)
    for rows in (1, 2, 4, 5, 8, 17, 64, 65):
        x, residual = new(rows, hidden), new(rows, hidden)
        assert all(map(vx.same_bits, ranked(x, residual), whole(x, residual))), rows
        with torch.cuda.stream(stream):
            stream.wait_stream(torch.cuda.default_stream(device))
            found: list = []
            graph = vx.cuda_graph(lambda x=x, r=residual, found=found: found.__setitem__(slice(None), ranked(x, r)))
            for turn in range(5):
                x.copy_(new(rows, hidden))
                graph()
                stream.synchronize()
                assert all(map(vx.same_bits, found, whole(x, residual))), (rows, turn)


def again(peers, own, new, wide: int) -> None:
    """More often than a flag counts to, in a graph, each time other rows."""
    stream = vx.cuda_stream(peers.device)
    x, residual, weight = new(70, wide), new(70, wide), new(wide)
    with torch.cuda.stream(stream):
        stream.wait_stream(torch.cuda.default_stream(peers.device))
        mine, wrong = torch.empty_like(own(x, 1)), torch.zeros(1, dtype=torch.int64, device=peers.device)

        def run():
            for _ in range(100):
                x.copy_(x.roll(1, 0))
                mine.copy_(own(x, 1))
                found = vx.rmsnorm_gather(mine, weight, 1e-6, residual, peers)
                expected = vx.rmsnorm(x, weight, 1e-6, residual)
                for one, other in zip(found, expected):
                    wrong.add_(vx.different(one, other).sum())

        run()
        graph = vx.cuda_graph(run)
        for _ in range(7):
            graph()
        stream.synchronize()
        assert int(wrong) == 0


class Mixtures:
    """A mixture in bf16 that all ranks know, whole, and this rank's rows of it."""

    def __init__(self, peers, experts: int, hidden: int, inner: int, top_k: int, where="cpu"):
        self.peers, self.experts, self.top_k = peers, experts, top_k
        self._where = {"device": where, "generator": torch.Generator(where).manual_seed(1)}
        gate, up = (self.new(experts, inner, hidden, scale=hidden**-0.5) for _ in range(2))
        self.down = self.new(experts, hidden, inner, scale=inner**-0.5)
        self.gate_up = torch.cat([gate, up], 1)
        rank, size = peers.rank, peers.size
        self.own_gate_up = torch.cat([half.chunk(size, 1)[rank] for half in (gate, up)], 1)
        self.own_down = self.down.chunk(size, 1)[rank].contiguous()
        self.norm = self.new(hidden)

    def new(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        """Alike on all ranks."""
        made = torch.randn(shape, **self._where, dtype=torch.float32) * scale
        return made.to(torch.bfloat16).to(self.peers.device)

    def routed(self, tokens: int, how: str) -> tuple[torch.Tensor, torch.Tensor]:
        weights = torch.rand(tokens, self.top_k, **self._where, dtype=torch.float32)
        ids = torch.randint(-1, self.experts + 1, (tokens, self.top_k), **self._where, dtype=torch.int32)
        ids = {
            "some": ids,
            "half": ids // 2 * 2,
            "one": torch.full_like(ids, self.experts - 1),
            "none": torch.full_like(ids, -1),
        }[how]
        return weights.to(self.peers.device), ids.to(self.peers.device)

    def whole(self, x, weights, ids, activation="silu"):
        return vx.fused_moe(x, self.gate_up, self.down, weights, ids, activation=activation)

    def ranked(self, x, weights, ids, between, activation="silu"):
        """This rank's columns."""
        own = self.own_gate_up, self.own_down
        return vx.fused_moe(x, *own, weights, ids, activation=activation, between=between)

    def chain(self, x, routes, between=None, wait=None) -> list[torch.Tensor]:
        """One mixture after another, as layers have them, wait(i) before the i-th; of one rank without `between`."""
        residual, found = x, []
        for i, route in enumerate(routes):
            if wait is not None:
                wait(i)
            if between is None:
                x, residual = vx.rmsnorm(self.whole(x, *route), self.norm, 1e-6, residual)
            else:
                x, residual = vx.rmsnorm_gather(
                    self.ranked(x, *route, between), self.norm, 1e-6, residual, self.peers, settled=True
                )
            found.append(x)
        return found


def mixtures(peers, rank: int, size: int, device) -> None:
    """What experts compute is sent while it is computed: the bits of one GPU, of any routing, often in a row."""
    cuda.SENDS, sent = 1, counted(cuda)
    columns = 48 * size
    for experts, hidden, inner, top_k in ((8, 192, columns, 4), (5, 64 * size, 2 * columns, 3), (128, 96, columns, 8)):
        of = Mixtures(peers, experts, hidden, inner, top_k)
        landing = peers.landing(777 * top_k * inner * 2)
        for activation in ("silu", "gelu_tanh"):
            before = len(sent)
            x, (weights, ids) = of.new(64, hidden), of.routed(64, "some")
            of.ranked(x, weights, ids, landing, activation)
            assert len(sent) == before, "what nobody has verified was sent"
            why = vx.fused_moe_send(landing, of.own_gate_up, top_k, activation=activation)
            assert not why, why
            for tokens, how in ((1, "some"), (64, "some"), (65, "one"), (300, "half"), (777, "some"), (30, "none")):
                x, route = of.new(tokens, hidden), of.routed(tokens, how)
                before = len(sent)
                found = peers.gather(of.ranked(x, *route, landing, activation))
                assert len(sent) == before + 1, (tokens, how)
                assert same(found, of.whole(x, *route, activation)), (experts, hidden, tokens, how, activation)
            before, x, route = len(sent), of.new(778, hidden), of.routed(778, "some")
            assert same(peers.gather(of.ranked(x, *route, landing, activation)), of.whole(x, *route, activation))
            assert len(sent) == before, "more was sent than there is room for"
    often(of, landing)
    again_and_again(of, landing)


def counted(room) -> list:
    """A call for each time that a mixture is sent."""
    send, sent = room.grouped_gate_up_send, []
    room.grouped_gate_up_send = lambda *args: sent.append(args[0].shape) or send(*args)
    return sent


def often(of: Mixtures, landing) -> None:
    """In a graph, whose routing changes."""
    device, stream = of.peers.device, vx.cuda_stream(of.peers.device)
    with torch.cuda.stream(stream):
        stream.wait_stream(torch.cuda.default_stream(device))
        x, routes = of.new(200, of.norm.numel()), [of.routed(200, "some") for _ in range(6)]
        of.chain(x, routes, landing)
        found: list = []
        graph = vx.cuda_graph(lambda: found.__setitem__(slice(None), of.chain(x, routes, landing)))
        for turn in range(20):
            x.copy_(of.new(*x.shape))
            for weights, ids in routes:
                for to, new in zip((weights, ids), of.routed(200, ("some", "half", "one", "none")[turn % 4])):
                    to.copy_(new)
            graph()
            stream.synchronize()
            assert all(map(same, found, of.chain(x, routes))), turn


def again_and_again(of: Mixtures, landing, count: int = 400) -> None:
    """Hundreds in a row, each of what the last one gave, while now this rank comes late and now another."""
    stream = vx.cuda_stream(of.peers.device)
    with torch.cuda.stream(stream):
        stream.wait_stream(torch.cuda.default_stream(of.peers.device))
        x, routes = of.new(150, of.norm.numel()), [of.routed(150, "some") for _ in range(count)]
        expected = of.chain(x, routes)
        late = [(7 * i + 3) % (of.peers.size + 1) == of.peers.rank for i in range(count)]
        found = of.chain(x, routes, landing, lambda i: torch.cuda._sleep(20_000 * late[i]))
        stream.synchronize()
        assert all(map(same, found, expected))


def main() -> None:
    rank, size, index, folder, what = (
        int(sys.argv[1]),
        int(sys.argv[2]),
        int(sys.argv[3]),
        Path(sys.argv[4]),
        sys.argv[5],
    )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    exchange = exchange_in(folder, rank, size)
    if what == "unreachable" and rank == 1:
        given = exchange

        def exchange(data: bytes) -> list[bytes]:
            return [b"\x01" * 64 if len(part) == 64 and r == 0 else part for r, part in enumerate(given(data))]

    late = {
        "late": lambda x: peers.gather(x),
        "late, packed": lambda x: peers.gather(x, packed=True),
        "late, packed and normed": lambda x: peers.norm_packed(
            x.bfloat16(), x.new_ones(16).bfloat16(), 1e-6, x.new_zeros(1, 16).bfloat16(), False
        )[0],
        "late, received": lambda x: peers.receive(x),
        "late, normed": lambda x: vx.rmsnorm_gather(x, x.new_ones(16), 1e-6, x.new_zeros(1, 16), peers)[0],
    }
    peers = vx.Peers(rank, size, device, exchange, limit=3.0 if what in late else 60.0)
    if what in late:
        if rank == 0:
            exchange_in(folder / "end", rank, size)(b"")
            return
        try:
            late[what](torch.zeros(1, 8, dtype=torch.float32, device=device)).cpu()
        except RuntimeError:
            sys.stdout.write(f"missing: {peers.missing}\n")
        exchange_in(folder / "end", rank, size)(b"")
        return
    {"gathers": gathers, "unreachable": gathers, "sent": sent, "mixtures": mixtures}[what](peers, rank, size, device)
    torch.cuda.synchronize()
    exchange(b"done")
    peers.close()
    peers.close()
    sys.stdout.write("equal\n")


if __name__ == "__main__":
    main()
