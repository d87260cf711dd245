"""Objects of a class: who wraps a model, which does not know its wrapper.

They are looked for among what refers to the class, and not among all objects: whoever holds those (gc.get_objects)
holds tuples too that other threads are making of an iterator just then, which fails with a SystemError there: a step of
an engine beside a trainer, say.
"""

import gc
from collections.abc import Iterator
from typing import TypeVar

T = TypeVar("T")


def instances(kind: type[T]) -> Iterator[T]:
    """Of this class, made by a `class` statement, and of those derived from it, each once; not what gc.freeze() has put
    aside."""
    seen, left = set(), [kind]
    while left:
        one = left.pop()
        if one not in seen:
            seen.add(one)
            left += type.__subclasses__(one)
            yield from [o for o in gc.get_referrers(one) if type(o) is one]
