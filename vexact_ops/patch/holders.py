"""Modules that have a module among theirs, which it does not know: they are looked for among what refers to it.

Not among all objects: whoever holds those (gc.get_objects) holds tuples too that other threads are making of an
iterator just then, which fails with a SystemError there: a step of an engine beside a trainer, say.
"""

import gc
from collections.abc import Iterator

from torch import nn


def modules_around(module: nn.Module) -> Iterator[nn.Module]:
    """Those that hold it, however deep, each once; not itself."""
    seen, left = {id(module)}, [module]
    while left:
        for owner in _owners(left.pop()):
            if id(owner) not in seen:
                seen.add(id(owner))
                left.append(owner)
                yield owner


def _owners(module: nn.Module) -> Iterator[nn.Module]:
    for children in gc.get_referrers(module):
        if not isinstance(children, dict) or not all(c is None or _is_module(c) for c in list(children.values())):
            continue
        for holder in gc.get_referrers(children):
            if _is_module(holder):  # whose attributes are no dictionary yet, or count as its own
                attributes, owners = holder.__dict__, [holder]
            elif type(holder) is dict and holder.get("_modules") is children:
                attributes, owners = holder, [o for o in gc.get_referrers(holder) if _is_module(o)]
            else:
                continue
            if attributes.get("_modules") is children:
                yield from (owner for owner in owners if owner.__dict__ is attributes)


def _is_module(o: object) -> bool:
    """By its type, for __class__ of any object may be computed."""
    return issubclass(type(o), nn.Module)
