"""Work that is done while its client is there, and for no longer than its time."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any


class Gone(Exception):
    """The client has closed its connection."""


class Late(Exception):
    """The time was over before the work was done."""


async def attended(
    receive: Callable[[], Awaitable[dict]],
    work: Awaitable[Any],
    seconds: float,
    may_expire: Callable[[], bool] = lambda: True,
) -> Any:
    """What the work returns or raises. Gone or Late otherwise: the work is cancelled then, and waited for no longer
    than its own cleaning up takes, whatever it waited for.

    receive      of the request, whose body has been read: what comes now is the connection's end
    may_expire   asked once the time is over: False where the work is as good as done
    """

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        done, _ = await asyncio.wait({working, watching}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            if may_expire():
                raise Late
            await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Gone
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)
