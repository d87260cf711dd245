"""Steps that take their time, so that what a test does in the midst of a request is done there on any machine."""

import time


def slow(engine, seconds: float = 0.05) -> None:
    """From the next step on each takes so long at least; 0: as long as it takes."""
    scheduler = engine._scheduler
    vars(scheduler).pop("schedule", None)
    if seconds:
        schedule = scheduler.schedule

        def later(*args, **kwargs):
            time.sleep(seconds)
            return schedule(*args, **kwargs)

        scheduler.schedule = later


def slow_server(server, seconds: float = 0.05) -> None:
    """Of an actor: actor.__ray_call__.remote(slow_server)."""
    slow(server.engine, seconds)


def drawn_by(server) -> int:
    """Of an actor: how many tokens each of its requests has drawn, of the one with the fewest; 0 without any."""
    running = list(server.engine._scheduler.running)
    return min((len(sequence.tokens) - sequence.num_prompt for sequence in running), default=0)
