"""One progress bar for everything that takes long: drawn on a terminal only, or where it is asked for; and plain lines
instead of it, for logs, where a program asks for those."""

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator

# (what is done now, how much of it, of how much in all[, a word beside it])
Progress = Callable[..., None]

_LOCK = threading.Lock()
_open: list = []  # what draws now is the last of these: a bar inside another one takes its place
_lines: "list[_Lines]" = []  # the same of plain lines
EVERY = 10.0  # seconds from one plain line of a phase to the next


def quiet(what: str, done: int, total: int, note: str = "") -> None:
    """For whoever wants to see nothing."""


def logged(show: Progress, log: logging.Logger) -> Progress:
    """As `show`, and in a log what begins, and now and then how far it is: a start may take minutes on a machine that
    knows nothing, where nobody watches."""
    last, begin, said = "", 0.0, 0.0

    def both(what: str, done: int, total: int, note: str = "") -> None:
        nonlocal last, begin, said
        show(what, done, total, note)
        now = time.monotonic()
        if what != last:
            if last:
                log.info("%s: done in %.1f s", last, now - begin)
            log.info("%s: begun", what)
            last, begin, said = what, now, now
        elif now - said >= EVERY:
            log.info("%s: %d of %d, %s, for %.0f s now", what, done, total, note or "going on", now - begin)
            said = now

    return both


class _Lines:
    """A line on standard error when another phase begins, and now and then within one. One bar inside another begins no
    phase: it adds to what is said now and then."""

    def __init__(self, outer: "_Lines | None", sizes: bool):
        self.outer, self.sizes, self.what = outer, sizes, ""
        self.begin = time.monotonic() if outer is None else outer.begin
        self.said = 0.0 if outer is None or sizes else time.monotonic()

    def __call__(self, what: str, done: int, total: int, note: str = "") -> None:
        now = time.monotonic()
        begins = what != self.what and (self.outer is None or self.sizes)
        self.what = what
        if not begins and now - self.said < EVERY:
            return
        self.said = now
        unit = ""
        if self.sizes:
            done, total, unit = done >> 20, -(-total >> 20), " MiB"
        far = f": {done} of {total}{unit}" if total > 1 and (done or self.sizes) else ""
        print(f"[{now - self.begin:6.1f} s] {what}{far}{', ' if note else ''}{note}", file=sys.stderr, flush=True)  # noqa: T201


@contextlib.contextmanager
def bar(wanted: bool | None = None, *, sizes: bool = False, lines: bool = False) -> Iterator[Progress]:
    """A Progress that draws on standard error, and is gone when the block is left.

    wanted   None: on a terminal only
    sizes    what is counted is bytes
    lines    where nothing is drawn, for want of a terminal, plain lines instead; of bars inside this one too
    """
    if not (sys.stderr.isatty() if wanted is None else wanted):
        if wanted is None and (lines or _lines):
            with _LOCK:
                _lines.append(_Lines(_lines[-1] if _lines else None, sizes))
                mine = _lines[-1]
            try:
                yield mine
            finally:
                with _LOCK:
                    _lines.remove(mine)
        else:
            yield quiet
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Drawing

    count = DownloadColumn() if sizes else MofNCompleteColumn()
    columns = TextColumn("{task.description}"), BarColumn(), count, TextColumn("{task.fields[note]}")
    drawing = Drawing(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True)
    task = None

    def show(what: str, done: int, total: int, note: str = "") -> None:
        nonlocal task
        if task is None:
            task = drawing.add_task(what, total=total, note=note)
        elif drawing.tasks[0].description != what:
            drawing.reset(task, description=what, total=total, note=note)
        drawing.update(task, completed=done, total=total, note=note)

    with _LOCK:
        for other in _open:
            other.stop()
        _open.append(drawing)
        drawing.start()
    try:
        yield show
    finally:
        with _LOCK:
            drawing.stop()
            _open.remove(drawing)
            for other in _open[-1:]:
                other.start()
