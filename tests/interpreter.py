"""Makes Triton's interpreter (TRITON_INTERPRET=1, numpy on the CPU) round as the GPU does.

As shipped it computes tl.fma with two roundings, truncates fp32 to bf16, reads bf16 operands of tl.dot as integers,
and leaves the order of tl.dot to numpy, where the bits of a row may depend on its place in the tile. Replaced, its
arithmetic is that of the CPU kernels; tl.dot takes k ascending in one fused accumulator, as the contract has it.
It cannot show what a compiler or a tensor core does to an order: that is what the tests on a GPU are for.
"""

import math

import numpy as np
import torch
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def _two_sum(a, b):
    """(s, e) with s = fl(a + b) and s + e = a + b exactly (Knuth)."""
    s = a + b
    t = s - a
    return s, (a - (s - t)) + (b - t)


def _two_product(a, b):
    """(p, e) with p = fl(a b) and p + e = a b exactly, for float64 (Veltkamp and Dekker)."""

    def halves(x):
        c = x * 134217729.0
        high = c - (c - x)
        return high, x - high

    p, (a1, a2), (b1, b2) = a * b, halves(a), halves(b)
    return p, a2 * b2 - (((p - a1 * b1) - a2 * b1) - a1 * b2)


def _odd_sum(a, b):
    """a + b rounded to odd: an inexact sum ends in a set bit, so that rounding it again is as good as rounding once."""
    return _to_odd(*_two_sum(a, b))


def _to_odd(s, e):
    bits = s.view(np.int64)
    nudge = (np.abs(e) > 0) & ((bits & 1) == 0)  # where s is not finite, e is NaN
    away = ((bits ^ e.view(np.int64)) >> 63) | 1  # 1 where e points away from zero, as s does, else -1
    return (bits + nudge * away).view(np.float64)


def fma(a, b, c):
    """Fused multiply-add of numpy arrays in c's precision, fp32 or float64; exact but for float64's far ends."""
    single = np.asarray(c).dtype == np.float32
    a, b, c = np.broadcast_arrays(*(np.asarray(v, np.float64) for v in (a, b, c)))
    if single:  # the product is exact in float64
        return _odd_sum(a * b, c).astype(np.float32)
    # Boldo and Melquiond, Emulation of a FMA and correctly rounded sums, IEEE Transactions on Computers 57 (2008)
    p, low = _two_product(a, b)
    t, t_low = _two_sum(c, low)
    v, v_low = _two_sum(p, t)
    return v + _odd_sum(t_low, v_low)


def _to_float(data, dtype):
    if dtype.scalar == tl.bfloat16:
        return (data.astype(np.uint32) << 16).view(np.float32)
    return data.astype(np.float32)


def _create_fma(self, x, y, z):
    return TensorHandle(fma(x.data, y.data, z.data), z.dtype.scalar)


def _create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
    x, y, acc = _to_float(a.data, a.dtype), _to_float(b.data, b.dtype), d.data.astype(np.float64)
    x, y = x.astype(np.float64), y.astype(np.float64)  # so that products are exact
    for k in range(x.shape[-1]):  # order: as the CPU kernels
        s, e = _two_sum(x[..., :, k, None] * y[..., None, k, :], acc)
        if e.any():  # of 16-bit operands most sums are exact too
            s = _to_odd(s, e)
        acc = s.astype(np.float32).astype(np.float64)
    return TensorHandle(acc.astype(np.float32), d.dtype.scalar)


_cast = InterpreterBuilder.cast_impl


def _cast_impl(self, src, dst_type):
    if src.dtype.scalar == tl.float32 and dst_type.scalar == tl.bfloat16:
        data = torch.from_numpy(np.ascontiguousarray(src.data)).bfloat16().view(torch.int16).numpy().view(np.uint16)
        return TensorHandle(data.reshape(src.data.shape), tl.bfloat16)
    if src.dtype.scalar == tl.bfloat16 and dst_type.scalar == tl.float32:
        return TensorHandle(_to_float(src.data, src.dtype), tl.float32)
    return _cast(self, src, dst_type)


_load, _store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store


def _as_mask(mask):
    """From 3.9 on its loads take booleans alone, while a scalar condition that meets a block leaves integers."""
    return TensorHandle(np.asarray(mask.data).astype(bool), mask.dtype)


def _create_masked_load(self, ptrs, mask, *rest):
    return _load(self, ptrs, _as_mask(mask), *rest)


def _create_masked_store(self, ptrs, value, mask, *rest):
    return _store(self, ptrs, value, _as_mask(mask), *rest)


_patch_lang, _patched = interpreter._patch_lang, set()


class _KeepPatches:
    def restore(self):
        pass


def _patch_lang_once(fn):
    """The interpreter patches triton.language anew for every call of a device function, which is most of its time."""
    modules = frozenset(m.__name__ for m in fn.__globals__.values() if m is tl or m is tl.core)
    if modules not in _patched:
        _patched.add(modules)
        _patch_lang(fn)
        tl.tensor.__index__ = lambda self: int(self.handle.data.item())  # numpy 2.4 refuses int() of a (1,) array
    return _KeepPatches()


_block, _tensor, _np_dtype = tl.block_type.__init__, tl.tensor.__init__, interpreter._get_np_dtype
_blocks: dict[tuple, dict] = {}
_tensors: dict[str, dict] = {}


def _block_once(self, element_ty, shape):
    """Of what the interpreter makes for every value, a block's type and what a tensor knows by its own, all that are
    alike have the same attributes."""
    if type(element_ty) is not tl.dtype:  # a pointer
        return _block(self, element_ty, shape)
    key = element_ty.name, *(size if type(size) is int else getattr(size, "value", size) for size in shape)
    known = _blocks.get(key)
    if known is not None:
        vars(self).update(known)
        return None
    _block(self, element_ty, shape)
    _blocks[key] = dict(vars(self))


def _tensor_once(self, handle, of):
    if type(of.element_ty if type(of) is tl.block_type else of) is not tl.dtype:
        return _tensor(self, handle, of)
    known = _tensors.get(of.name)  # a block's has its shape
    if known is None:
        _tensor(self, handle, of)
        _tensors[of.name] = {name: value for name, value in vars(self).items() if name != "handle"}
        return None
    vars(self).update(known)
    self.handle = handle


_np_dtypes: dict[str, np.dtype] = {}


def _np_dtype_once(of):
    scalar = of.element_ty if isinstance(of, tl.block_type) else of
    if type(scalar) is not tl.dtype:
        return _np_dtype(of)
    if scalar.name not in _np_dtypes:
        _np_dtypes[scalar.name] = _np_dtype(scalar)
    return _np_dtypes[scalar.name]


_SAME = frozenset(("fp32", "fp64", "int1", "int32", "int64"))  # two of one of these are computed in it
_checked, _casted = TritonSemantic.binary_op_type_checking_impl, TritonSemantic.cast
_broadcast = TritonSemantic.broadcast_impl_value
_constants: dict[tuple, tl.tensor] = {}


def _binary_op_type_checking_impl(self, lhs, rhs, *args, **kwargs):
    """What two operands become. Most are of one type already, but for a block and a single value, or a number: what is
    found out at length of all others takes longer than what is then computed."""
    if type(lhs) is tl.tensor:
        if type(rhs) is tl.tensor:
            if lhs.dtype.name in _SAME and lhs.dtype.name == rhs.dtype.name:
                if lhs.type is rhs.type:
                    return lhs, rhs
                if type(rhs.type) is tl.dtype:
                    return lhs, _spread(rhs, lhs)
                if type(lhs.type) is tl.dtype:
                    return _spread(lhs, rhs), rhs
        elif type(rhs) in (float, int) and (constant := _constant(lhs, rhs)) is not None:
            return lhs, constant
    elif type(lhs) in (float, int) and type(rhs) is tl.tensor and (constant := _constant(rhs, lhs)) is not None:
        return constant, rhs
    return _checked(self, lhs, rhs, *args, **kwargs)


def _spread(value, block):
    """A single value as a block."""
    data, shape = value.handle.data, block.handle.data.shape
    handle = TensorHandle(np.full(shape, data, data.dtype), value.dtype)
    return tl.tensor(handle, tl.block_type(value.dtype, list(shape)))


def _stretch(block, shape):
    data = block.handle.data
    if data.shape == shape:
        return block
    return tl.tensor(TensorHandle(np.broadcast_to(data, shape), block.dtype), tl.block_type(block.dtype, list(shape)))


def _constant(like, value):
    """This number as the other operand is, where that is fp32 or int32. No operation writes into its operands."""
    name = like.dtype.name
    if name == "int32":
        if type(value) is not int or not -(2**31) <= value < 2**31:
            return None
        kind = np.int32
    elif name == "fp32" and type(like.type) is tl.block_type and value == value:
        kind = np.float32
    else:
        return None
    shape = like.handle.data.shape if type(like.type) is tl.block_type else (1,)
    key = name, value, math.copysign(1.0, value), shape
    if key not in _constants:
        _constants[key] = tl.tensor(TensorHandle(np.full(shape, value, dtype=kind), like.dtype), like.type)
    return _constants[key]


_sanitized = TritonSemantic.binary_op_sanitize_overflow_impl
_EXACT = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


def _binary_op_sanitize_overflow_impl(self, lhs, rhs, binary_op):
    """That no sum, difference or product of integers leaves their type: computed as tensors, which takes ten times as
    long as what it is for, it would be a fifth of all."""
    if (lhs.dtype.name, rhs.dtype.name) != ("int32", "int32"):
        return _sanitized(self, lhs, rhs, binary_op)
    exact = _EXACT[binary_op.__name__](lhs.handle.data.astype(np.int64), rhs.handle.data)
    assert not exact.size or (exact.min() >= -(2**31) and exact.max() < 2**31), (
        f"int32 overflow detected for operation {binary_op.__name__}"
    )


def _cast_once(self, input, dst_ty, fp_downcast_rounding=None):
    if fp_downcast_rounding is None and type(dst_ty) is tl.dtype and input.dtype.name == dst_ty.name:
        return input
    return _casted(self, input, dst_ty, fp_downcast_rounding)


def _broadcast_impl_value(self, lhs, rhs):
    is_block = type(lhs.type) is tl.block_type, type(rhs.type) is tl.block_type
    if is_block == (True, False):
        return lhs, _spread(rhs, lhs)
    if is_block == (False, True):
        return _spread(lhs, rhs), rhs
    left, right = lhs.handle.data.shape, rhs.handle.data.shape
    if is_block == (False, False) or left == right:
        return lhs, rhs
    if len(left) != len(right):
        return _broadcast(self, lhs, rhs)
    shape = tuple(other if one == 1 else one for one, other in zip(left, right))
    return _stretch(lhs, shape), _stretch(rhs, shape)


def install() -> None:
    TritonSemantic.broadcast_impl_value = _broadcast_impl_value
    TritonSemantic.binary_op_type_checking_impl = _binary_op_type_checking_impl
    TritonSemantic.cast = _cast_once
    TritonSemantic.binary_op_sanitize_overflow_impl = _binary_op_sanitize_overflow_impl
    tl.block_type.__init__, tl.tensor.__init__ = _block_once, _tensor_once
    interpreter._get_np_dtype = _np_dtype_once
    interpreter._patch_lang = _patch_lang_once
    InterpreterBuilder.create_fma = _create_fma
    InterpreterBuilder.create_dot = _create_dot
    InterpreterBuilder.cast_impl = _cast_impl
    InterpreterBuilder.create_masked_load = _create_masked_load
    InterpreterBuilder.create_masked_store = _create_masked_store
    np.seterr(all="ignore")  # a masked-out lane may overflow here as it may on the GPU
