"""Runs a function on several gloo ranks, forked from the test, and hands their answers back."""

import multiprocessing
import queue
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed


def run_ranks(ranks: int, work: Callable[[int], Any], folder: Path, timeout_s: float = 60.0) -> list[Any]:
    """Answers of `work(rank)` by rank; an exception of one is raised here as its text.

    Forked, so that closures and loaded models need no pickling and nothing has to be imported again.
    """
    context = multiprocessing.get_context("fork")
    answers: Any = context.Queue()
    rendezvous = folder / f"rendezvous-{ranks}-{len(list(folder.glob('rendezvous-*')))}"
    processes = [
        context.Process(target=_enter, args=(rank, ranks, work, rendezvous, answers, timeout_s), daemon=True)
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    got: dict[int, Any] = {}
    try:
        while len(got) < ranks:
            rank, answer, error = answers.get(timeout=2 * timeout_s)
            if error is not None:
                raise AssertionError(f"rank {rank}: {error}")
            got[rank] = answer
    except queue.Empty:
        raise AssertionError(f"ranks {sorted(set(range(ranks)) - set(got))} gave no answer") from None
    finally:
        for process in processes:
            process.join(5)
            process.kill()
    return [got[rank] for rank in range(ranks)]


def _enter(rank: int, ranks: int, work: Callable[[int], Any], rendezvous: Path, answers: Any, timeout_s: float) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=timeout_s),
    )
    try:
        answers.put((rank, work(rank), None))
    except Exception as error:  # noqa: BLE001  reported to the test, which fails with it
        answers.put((rank, None, repr(error)))
    distributed.destroy_process_group()
