"""Finished training runs, as evaluation and export find them: manifest, config and fp32 masters."""

import tempfile
from pathlib import Path

from torch import Tensor

from dflash_core.drafter.config import DrafterConfig
from dflash_core.drafter.folder import CONFIG_FILE, WEIGHTS_FILE, read_config, read_state
from dflash_core.errors import ObjectMissing, StorageError
from dflash_core.records import DrafterCheckpoint
from dflash_core.storage.store import Store
from dflash_core.storage.transfers import download_file


def fetch_drafter(
    store: Store, checkpoint: DrafterCheckpoint, work_dir: Path
) -> tuple[DrafterConfig, dict[str, Tensor]]:
    """Download and verify a run's config and weights; they pass through `work_dir` and leave nothing there.

    Raises:
        ObjectCorrupt: an object is not what the manifest says.
        IncompatibleError: config and tensors do not belong together.
        StorageError: no room on the local disk.
    """
    try:
        work_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".drafter-", dir=work_dir) as name:
            folder = Path(name)
            download_file(store, checkpoint.config, folder / CONFIG_FILE)
            download_file(store, checkpoint.weights, folder / WEIGHTS_FILE)
            config = read_config(folder)
            # Cloned: the tensors map the file, which is about to go.
            return config, {name: tensor.clone() for name, tensor in read_state(folder, config).items()}
    except ObjectMissing as error:
        raise ObjectMissing(f"run {checkpoint.run} is not whole any more: {error}; train it again") from None
    except OSError as error:
        raise StorageError(f"storage.work_dir {work_dir} cannot take the drafter: {error}; free disk space") from None
