"""Tools to test the promise of aligned ops, here and elsewhere: byte comparison, adversarial inputs, properties."""

from .._core.proof.attention import Pages, attention_inputs, offsets
from .._core.proof.bitwise import assert_bitwise, count_different, different, same_bits
from .._core.proof.inputs import cancelling, special_rows, tricky
from .attention import check_attention, check_packing, check_paging, check_unseen
from .experts import check_grouped, offsets_of, spreads
from .properties import check_repeatable, check_rows, cpu_isas, on_cpu_isa, with_threads

__all__ = [
    "Pages",
    "assert_bitwise",
    "attention_inputs",
    "cancelling",
    "check_attention",
    "check_grouped",
    "check_packing",
    "check_paging",
    "check_repeatable",
    "check_rows",
    "check_unseen",
    "count_different",
    "cpu_isas",
    "different",
    "offsets",
    "offsets_of",
    "on_cpu_isa",
    "same_bits",
    "special_rows",
    "spreads",
    "tricky",
    "with_threads",
]
