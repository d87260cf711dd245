"""Inputs on which a changed order of summation shows, where Gaussian ones hide it behind the final rounding; and rows
of the values that kernels treat in ways of their own."""

from collections.abc import Sequence

import torch
from torch import Tensor


def cancelling(
    rows: int, k: int, n: int, seed: int, dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """x (rows, k) and w (n, k) whose product is zero but for rounding: every value and its negative meet the same
    weight at random places, over 25 binades, so almost any change of order changes most outputs, even in bf16."""
    g = torch.Generator().manual_seed(seed)
    v = torch.randn(rows, k // 2, generator=g, dtype=torch.float32)
    v = v * torch.exp2(torch.randint(-12, 13, v.shape, generator=g).float())
    u = torch.randn(k // 2, n, generator=g, dtype=torch.float32)
    order = torch.randperm(k // 2 * 2, generator=g)
    x, w = torch.cat([v, -v], 1)[:, order], torch.cat([u, u])[order].t()
    if k % 2:
        x = torch.cat([x, torch.randn(rows, 1, generator=g, dtype=torch.float32)], 1)
        w = torch.cat([w, torch.randn(n, 1, generator=g, dtype=torch.float32)], 1)
    return x.to(dtype).to(device), w.contiguous().to(dtype).to(device)


def tricky(*shape: int, seed: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Tensor:
    """Finite values of many magnitudes and both signs; zeros, negative zeros, subnormals and repeats among them."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=g, dtype=torch.float32)
    x = x * torch.exp2(torch.randint(-8, 9, shape, generator=g).float())
    special = torch.tensor([0.0, -0.0, 1e-40, -1e-40, 1.0, -1.0, 2.0**-126, 3.0], dtype=torch.float32)
    pick = torch.randint(0, 10 * len(special), shape, generator=g)
    x = torch.where(pick < len(special), special[pick.clamp(max=len(special) - 1)], x)
    return x.to(dtype).to(device)


# What a row may be made of: whole rows, and ordinary rows with one such value (or one of each sign) in them.
SPECIAL = (
    "one nan", "all nan", "one inf", "one -inf", "inf and -inf", "all inf", "-0", "0", "subnormals",
    "one subnormal", "largest", "one largest",
)  # fmt: skip
_BITS = {torch.bfloat16: (torch.int16, 7), torch.float16: (torch.int16, 10), torch.float32: (torch.int32, 23)}


SMALL = "-0", "0", "subnormals", "one subnormal"  # that make nothing infinite or NaN


def special_rows(x: Tensor, seed: int = 0, first: int = 0, kinds: Sequence[str] = SPECIAL) -> Tensor:
    """A copy of x (R, ...) in which every other row is special, of these kinds in turn; the rows between stay.

    first  which place of that pattern (ordinary, kinds[0], ordinary, kinds[1], ...) row 0 has: 2 i + 1 makes of x[:1] a
           row of kind i
    """
    x = x.clone(memory_format=torch.contiguous_format)
    rows, width = x.shape[0], x[0].numel() if x.shape[0] else 0
    if width == 0:
        return x
    flat, pattern = x.view(rows, width), 2 * len(kinds)
    integer, mantissa = _BITS[x.dtype]
    g = torch.Generator(x.device).manual_seed(seed)
    largest = torch.finfo(x.dtype).max
    for index, kind in enumerate(kinds):
        start = (2 * index + 1 - first) % pattern
        part = flat[start::pattern]  # a view
        count = part.shape[0]
        if not count:
            continue
        random = torch.randint(1 << 30, (count, width), generator=g, device=x.device)
        sign = 1.0 - 2.0 * (random & 1).to(x.dtype)
        places = random[:, :2] % width
        if kind in ("all nan", "all inf", "-0", "0"):
            part.fill_(float(kind.removeprefix("all ")))
        elif kind == "largest":
            part.copy_(sign * largest)
        elif kind == "subnormals":  # made of bits: arithmetic may flush them
            bits = 1 + (random >> 1) % ((1 << mantissa) - 1)
            part.view(integer).copy_(torch.where(random & 1 == 1, bits, bits + torch.iinfo(integer).min))
        elif kind == "one subnormal":  # whose product with an ordinary value is rounded to 0 of either sign, or is not
            part.zero_()
            smallest = torch.where(random[:, :1] & 1 == 1, 1, 1 + torch.iinfo(integer).min).to(integer)
            part.view(integer).scatter_(1, places[:, :1], smallest)
        else:
            value = largest if kind == "one largest" else float(kind.split()[-1] if kind != "inf and -inf" else "inf")
            part.scatter_(1, places[:, :1], value)
            if kind == "inf and -inf" and width > 1:
                part.scatter_(1, (places[:, :1] + 1 + places[:, 1:2] % (width - 1)) % width, -value)
    return x
