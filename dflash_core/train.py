"""The training process, `python -m dflash_core.train --recipe R`: training, and the probe that measures it as it goes.

Above the stages, as the command line is: training imports nothing later than itself, so the two meet here. The CLI and
the asset layer start it; with several drafters, torchrun starts it once more for each.
"""

import sys
from collections.abc import Sequence

from dflash_core.evaluation.probe import acceptance_probe
from dflash_core.training.launch import launch


def main(arguments: Sequence[str] | None = None) -> int:
    """Train as the arguments say; returns the exit code."""
    return launch(arguments, acceptance_probe)


if __name__ == "__main__":
    sys.exit(main())
