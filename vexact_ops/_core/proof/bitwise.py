"""Comparison of bytes: -0.0 is not 0.0, and a NaN equals only a NaN (of any payload)."""

import torch
from torch import Tensor

_INTS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def different(actual: Tensor, expected: Tensor) -> Tensor:
    """Where the bits of two tensors of one shape, dtype and device differ, as a mask. Raises ValueError where they are
    not of one shape and dtype.

    example
    >>> vx.different(torch.tensor([1.0, 0.0, torch.nan]), torch.tensor([1.0, -0.0, torch.nan])).tolist()
    [False, True, False]
    """
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        raise ValueError(f"different: expected one shape and dtype, got {_kind(actual)} and {_kind(expected)}")
    if not actual.dtype.is_floating_point:
        return actual != expected
    integer = _INTS[actual.element_size()]
    return (actual.contiguous().view(integer) != expected.contiguous().view(integer)) & ~(
        actual.isnan() & expected.isnan()
    )


def _kind(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)}"


def count_different(actual: Tensor, expected: Tensor) -> int:
    """How many elements differ in their bits. Raises AssertionError where shape or dtype differ."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        raise AssertionError(f"differ in kind: {_kind(actual)} against {_kind(expected)}")
    expected = expected.to(actual.device)
    return int(different(actual.detach(), expected.detach()).sum())


def same_bits(actual: Tensor, expected: Tensor) -> bool:
    """Whether both have one shape, one dtype and the same bits.

    example
    >>> vx.same_bits(torch.tensor(0.0), torch.tensor(-0.0)), torch.tensor(0.0) == torch.tensor(-0.0)
    (False, tensor(True))
    """
    return actual.shape == expected.shape and actual.dtype == expected.dtype and not count_different(actual, expected)


def assert_bitwise(actual: object, expected: object, label: str = "outputs") -> None:
    """Every tensor (or every tensor in a tuple or list) has the same bytes; otherwise AssertionError says how many
    elements differ, where the first one is, and its two values."""
    if isinstance(actual, tuple | list):
        if len(actual) != len(expected):
            raise AssertionError(f"{label} differ in number: {len(actual)} against {len(expected)}")
        for index, (a, e) in enumerate(zip(actual, expected)):
            assert_bitwise(a, e, f"{label}[{index}]")
        return
    if actual is None or expected is None:
        if actual is not expected:
            raise AssertionError(f"{label} differ: {actual} against {expected}")
        return
    count = count_different(actual, expected)
    if count:
        actual, expected = actual.detach().cpu(), expected.detach().cpu()
        where = tuple(different(actual, expected).nonzero()[0].tolist())
        got, want = actual[where].item(), expected[where].item()
        largest = (actual.double() - expected.double()).abs().nan_to_num(nan=float("inf")).max().item()
        raise AssertionError(
            f"{label} differ: {count} of {actual.numel()} elements, first at {where}: {got!r} against {want!r}; "
            f"largest difference {largest:.3g}"
        )
