"""Wait for an `async def` reward, in a notebook, too."""

import asyncio
import threading
from collections.abc import Awaitable
from functools import cache
from typing import Any

import torch


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """An event loop in a thread of its own.

    A notebook's main thread has a running loop, in which nothing can be waited for. One loop for all calls, since a
    reward's HTTP session belongs to the loop that it was first used in.
    """
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="async rewards", daemon=True).start()
    return loop


async def _finish(awaitable: Awaitable[Any]) -> Any:
    with torch.no_grad():  # holds for the thread that enters it
        return await awaitable


def wait_for(awaitable: Awaitable[Any]) -> Any:
    """What an awaitable comes to; called from outside of coroutines that this has started."""
    future = asyncio.run_coroutine_threadsafe(_finish(awaitable), _loop())
    try:
        return future.result()
    except BaseException:
        future.cancel()  # Ctrl-C while waiting
        raise
