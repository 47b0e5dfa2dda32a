"""What is done meanwhile begins without waiting for the work, goes on beside it, and has the last word."""

import threading

from dflash_core.training.ticking import ticking


def test_it_goes_on_beside_the_work_and_once_more_at_the_end() -> None:
    seen, thrice, after = list[str](), threading.Event(), list[int]()

    def act() -> None:
        seen.append(threading.current_thread().name)
        if len(seen) == 3:
            thrice.set()

    with ticking(act, 0.001, "meanwhile"):
        assert thrice.wait(60)
    after.append(len(seen))
    assert set(seen) == {"meanwhile"}
    assert not any(thread.name == "meanwhile" for thread in threading.enumerate())
    with ticking(act, 3600.0, "meanwhile"):
        assert len(seen) == after[0]
    assert len(seen) == after[0] + 1, "what came since the last time is not lost"
