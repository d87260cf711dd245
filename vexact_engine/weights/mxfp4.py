"""MXFP4 checkpoints (gpt-oss's): experts of 4 bits, which become numbers of 16 or 32 bits once, when they are read.

Of a stacked matrix X the files have X_blocks (E, R, G, 16), two numbers a byte, the lower four bits first, and X_scales
(E, R, G), exponents of two for each 32 numbers; the model has X (E, 32 G, R). A number of 4 bits times a power of two
is exact in bf16, so a trainer that reads the same files (`Mxfp4Config(dequantize=True)` of transformers) has the same
bits. Source: OCP Microscaling Formats (MX) v1.0, 2023.
"""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

METHOD = "mxfp4"
PART = re.compile(r"(.+)_(blocks|scales)")
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS, _NAN = 127, 255  # of a scale's exponent, and the one that is no number


def is_mxfp4(config: Mapping) -> bool:
    """Whether a config.json says that weights are so."""
    found = config.get("quantization_config")
    return isinstance(found, Mapping) and found.get("quant_method") == METHOD


def dequantised(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """(E, R, G, 16) and (E, R, G) of uint8 as (E, 32 G, R), whose rows lie as the files have them. ValueError on
    shapes."""
    if blocks.dim() != 4 or blocks.shape[-1] != 16 or blocks.shape[:-1] != scales.shape:
        raise ValueError(f"blocks {tuple(blocks.shape)} and scales {tuple(scales.shape)} are not those of one matrix")
    experts, rows, groups, _ = blocks.shape
    out = torch.empty(experts, rows, groups, 32, dtype=dtype, device=blocks.device)
    if not blocks.is_meta:
        low = torch.tensor((*_VALUES, *(-v for v in _VALUES)), dtype=dtype)
        byte = torch.arange(256)
        pairs = torch.stack((low[byte & 15], low[byte >> 4]), 1)
        for expert in range(experts):  # a table's indices are four times as large as a part of the result
            torch.index_select(pairs, 0, blocks[expert].flatten().int(), out=out[expert].view(-1, 2))
            exponent = scales[expert].int()
            factor = torch.ldexp(torch.ones(exponent.shape, dtype=torch.float32), exponent - _BIAS)
            out[expert] *= torch.where(exponent == _NAN, torch.nan, factor).to(dtype)[..., None]
    return out.view(experts, rows, 32 * groups).transpose(1, 2)


class Dequantise:
    """In the place of one of transformers' converters: see conversion.py."""

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype
        self._parts: dict[str, Tensor] = {}

    def add_tensor(self, key: str, name: str, pattern: str, value: Tensor) -> None:
        self._parts[pattern] = value

    def convert(self, key: str, **_) -> dict[str, Tensor]:
        if set(self._parts) != {"blocks", "scales"}:
            raise ValueError(f"there is {' and '.join(self._parts)} alone, expected blocks and scales")
        return {key: dequantised(self._parts["blocks"], self._parts["scales"], self.dtype)}
