"""Failures of the machine that a person can repair, as one sentence."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dflash_core.errors import StorageError, UserError
from dflash_core.recipe import Recipe

REPAIRABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EFBIG)


@contextmanager
def readable_failures(recipe: Recipe) -> Iterator[None]:
    """Turn a full disk and a full device into what to do about it.

    Raises:
        UserError: instead of the original.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"a device has too little memory: {str(error).splitlines()[0]} Lower training.batch_rows or "
            "training.anchors, or set training.gradient_checkpointing"
        ) from error
    except OSError as error:
        if error.errno not in REPAIRABLE:
            raise
        raise StorageError(
            f"cannot write below storage.work_dir {recipe.storage.work_dir}: {error}; free disk space or set another "
            "folder, then run the same command again"
        ) from error
