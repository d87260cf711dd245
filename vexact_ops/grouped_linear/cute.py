"""quack's product over groups of rows, a candidate (cuda.py verifies it)."""

import importlib.util

from torch import Tensor

INSTALLED = importlib.util.find_spec("quack") is not None and importlib.util.find_spec("cutlass") is not None


def product(rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """rows (R, K) of expert e @ weight[e] (K, N), any strides; what is behind the last expert is not written."""
    from quack.gemm_interface import gemm

    return gemm(rows, weight, cu_seqlens_m=offsets, tuned=False)  # tuned=True would pick its kernel by the clock
