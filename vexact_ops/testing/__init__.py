"""Tools to test the promise of aligned ops, here and elsewhere: byte comparison, adversarial inputs, properties."""

from .attention import Pages, attention_inputs, check_attention, check_packing, check_paging, check_unseen, offsets
from .bitwise import assert_bitwise, count_different
from .experts import check_grouped, offsets_of, spreads
from .inputs import cancelling, tricky
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
    "offsets",
    "offsets_of",
    "on_cpu_isa",
    "spreads",
    "tricky",
    "with_threads",
]
