"""The operators that have been registered, for those who look at calls of them from outside."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .operator import Operator

OPERATORS: "dict[str, Operator]" = {}  # by name
