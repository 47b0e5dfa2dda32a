"""The tiny targets and the drafter of tests/evaluation."""

from tests.evaluation.conftest import drafter, make_recipe, make_target, target_folder

__all__ = ["drafter", "make_recipe", "make_target", "target_folder"]
