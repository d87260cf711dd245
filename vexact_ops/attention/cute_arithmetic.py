"""Arithmetic of the CuTe kernels, as single instructions."""

from cutlass import Float32, Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op


def _asm(text: str, *values):
    operands = [Float32(v).ir_value() for v in values]
    constraints = ",".join(["=f", *["f"] * len(operands)])
    dialect = llvm.AsmDialect.AD_ATT
    return Float32(
        llvm.inline_asm(
            T.f32(), operands, text, constraints, has_side_effects=False, is_align_stack=False, asm_dialect=dialect
        )
    )


# Spelled out, so that no compiler chooses what is fused.
@dsl_user_op
def fma(a, b, c, *, loc=None, ip=None):
    return _asm("fma.rn.f32 $0, $1, $2, $3;", a, b, c)


@dsl_user_op
def mul(a, b, *, loc=None, ip=None):
    return _asm("mul.rn.f32 $0, $1, $2;", a, b)


@dsl_user_op
def add(a, b, *, loc=None, ip=None):
    return _asm("add.rn.f32 $0, $1, $2;", a, b)


@dsl_user_op
def moved(a, zero, *, loc=None, ip=None):
    """a, of a product of matrices, in another register: before one of a product is read, the assembler waits for all
    products under way if it has lost sight, behind a loop's end, of which these are.

    zero    0, which must not be known when this is compiled
    """
    return Float32(
        llvm.inline_asm(
            T.f32(),
            [Float32(a).ir_value(), Int32(zero).ir_value()],
            "xor.b32 $0, $1, $2;",
            "=f,f,r",
            has_side_effects=False,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
        )
    )


@dsl_user_op
def come_after(a, b, *, loc=None, ip=None):
    """What stands behind this waits for a and b, which are not negative. The assembler would pull a wait for a product
    of matrices ahead of the arithmetic that is to run beside it; it leaves a branch where it is."""
    llvm.inline_asm(
        None,
        [Float32(a).ir_value(), Float32(b).ir_value()],
        "{ .reg .pred p, q; setp.lt.f32 p, $0, 0f00000000; setp.lt.or.f32 q, $1, 0f00000000, p; "
        "vote.sync.any.pred p, q, 0xffffffff; @p trap; }",
        "f,f",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
