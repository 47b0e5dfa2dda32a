"""Something done again and again from a thread while other work goes on."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def ticking(act: Callable[[], None], every_s: float, name: str) -> Iterator[None]:
    """Call `act` every so many seconds while the context lasts, and once more at its end; `name` is the thread's."""
    ended = threading.Event()

    def tick() -> None:
        while not ended.wait(every_s):
            act()
        act()

    thread = threading.Thread(target=tick, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
