"""One progress bar for everything that takes long: drawn on a terminal only, or where it is asked for."""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator

# (what is done now, how much of it, of how much in all[, a word beside it])
Progress = Callable[..., None]

_LOCK = threading.Lock()
_open: list = []  # what draws now is the last of these: a bar inside another one takes its place


def quiet(what: str, done: int, total: int, note: str = "") -> None:
    """For whoever wants to see nothing."""


@contextlib.contextmanager
def bar(wanted: bool | None = None, *, sizes: bool = False) -> Iterator[Progress]:
    """A Progress that draws on standard error, and is gone when the block is left.

    wanted   None: on a terminal only
    sizes    what is counted is bytes
    """
    if not (sys.stderr.isatty() if wanted is None else wanted):
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
