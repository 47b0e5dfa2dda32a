"""`python -m dflash_core.cli`: the commands without Dagster."""

from dflash_core.cli import main

if __name__ == "__main__":
    main()
