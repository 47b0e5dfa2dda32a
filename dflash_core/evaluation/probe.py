"""Acceptance while a drafter is still in training: a few held-out prompts, decoded with it as it is now.

The trade-off: training may not import what evaluates it, so the training process (`dflash_core.train`) hands this in;
and the whole target serves training and probe alike, which costs the layers above the deepest captured one in each of
the lead's forward passes but no second copy in memory.
"""

from collections.abc import Callable

from dflash_core.evaluation.acceptance import acceptance_length, add
from dflash_core.evaluation.decode import Sampling, decode
from dflash_core.evaluation.drafts import DrafterDraft
from dflash_core.evaluation.prompts import held_out_prompts
from dflash_core.evaluation.target import VerifyingTarget
from dflash_core.training.probing import Probed

MAX_NEW_TOKENS = 64
"""At most; enough for some twenty verifications a prompt."""


def acceptance_probe(given: Probed) -> Callable[[], float]:
    """A function that decodes the recipe's probe prompts at temperature 0 and returns the acceptance length.

    Raises:
        UserError: no held-out row has a prompt.
    """
    recipe, drafter = given.recipe, given.drafter
    target = VerifyingTarget(given.model, drafter.config.target_layer_ids)
    prompts = held_out_prompts(given.rows, given.held_out, recipe.seed, recipe.training.acceptance_prompts)
    sampling = Sampling(min(MAX_NEW_TOKENS, recipe.evaluation.max_new_tokens), target.stop_tokens)
    draft = DrafterDraft(drafter, given.head.embedding, given.head.lm_head)

    def measure() -> float:
        drafter.eval()
        generations = decode(target, draft, [prompt.ids for prompt in prompts], sampling, batch=len(prompts))
        drafter.train()
        target.begin()  # no cache outlives the probe
        draft.begin()
        return acceptance_length(add([generation.histogram for generation in generations]))

    return measure
