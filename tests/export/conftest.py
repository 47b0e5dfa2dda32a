"""The drafters of tests/drafter."""

from tests.drafter.conftest import any_config, config, finished, make_drafter, make_recipe, target_folder

__all__ = ["any_config", "config", "finished", "make_drafter", "make_recipe", "target_folder"]
