"""Tools to test the promise of aligned ops, here and elsewhere: byte comparison, adversarial inputs, properties."""

from .bitwise import assert_bitwise, count_different
from .inputs import cancelling, tricky
from .properties import check_repeatable, check_rows, cpu_isas, on_cpu_isa, with_threads

__all__ = [
    "assert_bitwise",
    "cancelling",
    "check_repeatable",
    "check_rows",
    "count_different",
    "cpu_isas",
    "on_cpu_isa",
    "tricky",
    "with_threads",
]
