"""What the loop knows of plans in flight that it waits for."""

from typing import Protocol

from .plan import Sampled


class Pending(Protocol):
    """A plan in flight."""

    def ready(self) -> bool:
        """Whether wait() returns, or raises, at once."""

    def wait(self) -> Sampled:
        """What was drawn; -1 for a sequence whose logits are not numbers. Raises what the computation failed of."""


class Failed:
    """A plan whose launch has failed: it is found out in its turn."""

    def __init__(self, error: Exception):
        self.error = error

    def ready(self) -> bool:
        return True

    def wait(self) -> Sampled:
        raise self.error


def size(tokens: int) -> int:
    """To a quarter of a power of two: what plans of about so many tokens have in common."""
    low = max(0, tokens.bit_length() - 3)
    return tokens >> low << low


def is_ready(pending: Pending) -> bool:
    try:
        return pending.ready()
    except Exception:  # a device that has failed: wait() will say so
        return True
