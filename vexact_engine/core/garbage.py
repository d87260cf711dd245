"""Python's garbage collector, in processes that are an engine's alone."""

import atexit
import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def left() -> Iterator[None]:
    """In a with block nothing is collected: of what modules make there is nothing to, and that is a fifth of the time
    that importing them takes."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def freeze(alone: bool = True) -> None:
    """What is there by now stays, and no collection looks at it again: one that walks through torch, a model and its
    patch holds every thread for a quarter of a second, in which nobody gets a token. Once the engine stands, in a
    process that ends with it; a caller's own process is not ours to do this in.

    alone   whether this is such a process: nothing is done otherwise
    """
    if alone:
        gc.collect()
        gc.freeze()
        atexit.register(gc.unfreeze)  # what is frozen is not freed at the end, and Triton's bindings list it as leaked
