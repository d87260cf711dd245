"""What the golden digests are taken of: tensors made of integers alone, bit by bit, so that they depend on no random
number generator and no rounding."""

import torch
from torch import Tensor


def hashed(*shape: int, seed: int) -> Tensor:
    """Integers from 0 to 2^48 - 1 that look random (splitmix64's steps; int64 wraps around)."""
    x = torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.int64) + seed * 1_000_003
    x = x * -7046029254386353131
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        x = (x ^ (x >> shift & (1 << 64 - shift) - 1)) * factor
    return (x >> 16 & (1 << 48) - 1).view(shape)


class Inputs:
    """Tensors of one dtype on one device; every value is exact in it."""

    def __init__(self, dtype: torch.dtype, device: str):
        self.dtype, self.device = dtype, device
        self._seed = 0

    def _hashed(self, *shape: int) -> Tensor:
        self._seed += 1
        return hashed(*shape, seed=self._seed)

    def _give(self, x: Tensor) -> Tensor:
        return x.to(self.dtype).to(self.device)

    def _plain(self, *shape: int, low: int, high: int) -> Tensor:
        h = self._hashed(*shape)
        exponent = 127 + low + (h >> 32) % (high - low + 1)
        mantissa = h & (0x7FFFFF if self.dtype == torch.float32 else 0x7F0000)  # 7 bits: exact in all 16-bit types
        bits = (h >> 31 & 1) << 31 | exponent << 23 | mantissa
        return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)

    def values(self, *shape: int, low: int = -4, high: int = 1) -> Tensor:
        """Both signs, magnitudes from 2^low to 2^(high + 1)."""
        return self._give(self._plain(*shape, low=low, high=high))

    def special(self, finite: bool = True) -> Tensor:
        """Zeros of both signs, the least normal number and some below it, the largest; infinities and NaN. In fp32."""
        least, largest = {torch.float16: (0x388 << 20, 0x477FE000), torch.bfloat16: (0x008 << 20, 0x7F7F0000)}.get(
            self.dtype, (0x008 << 20, 0x7F7FFFFF)
        )
        if self.dtype == torch.float16:  # below its normal numbers are such of fp32
            quarter, eighth = 0x378 << 20, 0x370 << 20
        else:
            quarter, eighth = 0x002 << 20, 0x001 << 20
        minus = -(1 << 31)
        some = [0, minus, least, minus + least, quarter, minus + eighth, largest, minus + largest]
        some += [] if finite else [0x7F8 << 20, minus + (0x7F8 << 20), 0x7FC << 20]
        return torch.tensor(some, dtype=torch.int32).view(torch.float32)

    def tricky(self, *shape: int, low: int = -4, high: int = 1) -> Tensor:
        """values, with zeros of both signs, subnormals and the largest finite ones among them."""
        special, pick = self.special()[:6], self._hashed(*shape) % 48
        x = self._plain(*shape, low=low, high=high)
        return self._give(torch.where(pick < len(special), special[pick.clamp(max=len(special) - 1)], x))

    def hard(self, rows: int, width: int) -> Tensor:
        """Rows of subnormals, rows with one value that is special (infinities and NaN among them), ordinary rows."""
        x = self._plain(rows, width, low=-4, high=1)
        special, where = self.special(finite=False), self._hashed(rows) % width
        subnormal = special[[4, 5, 4]]
        for row in range(rows):
            if row % 4 == 0:
                x[row, where[row]] = special[row // 4 % len(special)]
            elif row % 4 == 1:
                x[row] = subnormal[torch.arange(width) % 3]
        return self._give(x)

    def cancelling(self, rows: int, k: int, n: int) -> tuple[Tensor, Tensor]:
        """x (rows, k), w (n, k) whose product is zero but for rounding: any other order of summation shows."""
        v, u = self._plain(rows, k // 2, low=-9, high=9), self._plain(n, k // 2, low=-2, high=1)
        order = self._hashed(k // 2 * 2).argsort()
        x, w = torch.cat([v, -v], 1)[:, order], torch.cat([u, u], 1)[:, order]
        if k % 2:
            last = (self._plain(count, 1, low=-4, high=1) for count in (rows, n))
            x, w = (torch.cat(both, 1) for both in zip((x, w), last))
        return self._give(x), self._give(w)

    def below(self, bound: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return (self._hashed(*shape) % bound).to(dtype).to(self.device)

    def distinct(self, rows: int, count: int, bound: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """(rows, count) of the integers below bound, no two equal in a row."""
        return self._hashed(rows, bound).argsort(1)[:, :count].contiguous().to(dtype).to(self.device)

    def keys(self, lengths: list[int], hq: int, hk: int, d: int, dv: int) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v of packed sequences; every other key repeats the one before it with the negated value."""
        total = sum(lengths)
        q, k = self._plain(total, hq, d, low=-3, high=0), self._plain(total, hk, d, low=-3, high=0)
        v = self._plain(total, hk, dv, low=-6, high=6)
        k[1::2], v[1::2] = k[: total // 2 * 2 : 2], -v[: total // 2 * 2 : 2]
        return self._give(q), self._give(k), self._give(v)
