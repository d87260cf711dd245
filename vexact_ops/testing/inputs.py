"""Inputs on which a changed order of summation shows, where Gaussian ones hide it behind the final rounding."""

import torch
from torch import Tensor


def cancelling(
    rows: int, k: int, n: int, seed: int, dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """x (rows, k) and w (n, k) whose product is zero but for rounding: every value and its negative meet the same
    weight at random places, over 25 binades, so almost any change of order changes most outputs, even in bf16."""
    g = torch.Generator().manual_seed(seed)
    v = torch.randn(rows, k // 2, dtype=torch.float32, generator=g)
    v = v * torch.exp2(torch.randint(-12, 13, v.shape, generator=g).float())
    u, order = torch.randn(k // 2, n, dtype=torch.float32, generator=g), torch.randperm(k // 2 * 2, generator=g)
    x, w = torch.cat([v, -v], 1)[:, order], torch.cat([u, u])[order].t()
    if k % 2:
        x = torch.cat([x, torch.randn(rows, 1, dtype=torch.float32, generator=g)], 1)
        w = torch.cat([w, torch.randn(n, 1, dtype=torch.float32, generator=g)], 1)
    return x.to(dtype).to(device), w.contiguous().to(dtype).to(device)


def tricky(*shape: int, seed: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Tensor:
    """Finite values of many magnitudes and both signs; zeros, negative zeros, subnormals and repeats among them."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, dtype=torch.float32, generator=g)
    x = x * torch.exp2(torch.randint(-8, 9, shape, generator=g).float())
    special = torch.tensor([0.0, -0.0, 1e-40, -1e-40, 1.0, -1.0, 2.0**-126, 3.0], dtype=torch.float32)
    pick = torch.randint(0, 10 * len(special), shape, generator=g)
    x = torch.where(pick < len(special), special[pick.clamp(max=len(special) - 1)], x)
    return x.to(dtype).to(device)
