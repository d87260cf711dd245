"""For how long other processes are waited for, in seconds. One that has died is noticed at once; these are about one
that stands still: it is stopped, or its device does not come back."""

from collections.abc import Mapping
from typing import Any

# Of a replica
ABORT = 1.0  # to say what a request has that it is to end
STATS = 1.0  # to say what it has counted
CLOSE = 15.0  # to end what it does
GONE = 5.0  # for a process to go whose socket is closed

# Of a replica or a stage
ANSWER = 60.0  # to do what is done between two steps
MOVE = 600.0  # to give back memory, or take it again

# Of a stage
START = 1800.0  # to make it, of its part of the weights
PING = 2.0  # to say that it is there, by a thread that computes nothing
STEP = 900.0  # from a plan's launch to what it draws; kernels may be compiled meanwhile
MESSAGE = 60.0  # to take in what it is told, which it does while it computes too
END = 5.0  # to end by itself

# Of other machines
PLACE = 60.0  # for Ray to find room that is there
HANDSHAKE = 10.0  # to prove that one belongs here
SILENT = 20  # whole seconds after which a machine that answers nothing is gone
WHY = 1.0  # for what ended a process to show, where another has failed by it


def of(what: str, arguments: Mapping[str, Any]) -> float | None:
    """For a replica to do that; None where it waits for requests to end."""
    if arguments.get("mode") == "wait" and what in ("pause", "sleep"):
        return None
    return MOVE if what in ("sleep", "wake_up") else ANSWER
