"""The whole target with its key-value cache: scores a block, hands out features, forgets what was not accepted.

The trade-off: attention caches are cropped; states that cannot be (linear attention, sliding windows past their length)
are kept from before the block and the accepted tokens run again, which costs one more pass for each block not wholly
accepted but needs nothing from the architecture.
Shapes: s tokens of a pass, L captured layers, H hidden size, V vocabulary.
"""

import copy
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import DynamicLayer

from dflash_core.training.target import load_frozen


class VerifyingTarget:
    """One sequence at a time, nothing trained."""

    def __init__(self, model: nn.Module, layer_ids: tuple[int, ...]) -> None:
        """
        Args:
            model: a Hugging Face causal LM, untruncated.
            layer_ids: decoder layers whose outputs are the features, ascending.
        """
        self.device = next(model.parameters()).device
        self.model = cast(Any, model.eval())
        self._captured: list[Tensor] = []
        layers = self.model.get_decoder().layers
        for layer in layer_ids:
            layers[layer].register_forward_hook(self._hook())
        # transformers 5.40 drops the older name, earlier releases do not know the newer.
        names = inspect.signature(self.model.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"
        self.begin()

    @property
    def stop_tokens(self) -> frozenset[int]:
        """Tokens that end an answer, from the generation config and the model's config."""
        named = (self.model.generation_config.eos_token_id, self.model.config.get_text_config().eos_token_id)
        return frozenset(token for entry in named for token in ([entry] if isinstance(entry, int) else entry or []))

    @property
    def embedding(self) -> Tensor:
        """[V, H]."""
        weight: Tensor = self.model.get_input_embeddings().weight
        return weight.detach()

    @property
    def lm_head(self) -> Tensor:
        """[V, H]."""
        weight: Tensor = self.model.get_output_embeddings().weight
        return weight.detach()

    def begin(self) -> None:
        """Forget everything: a new sequence."""
        self._cache = DynamicCache(config=self.model.config.get_text_config())
        self._tokens = torch.empty(1, 0, dtype=torch.int64, device=self.device)
        self._before: list[Any] | None = None

    @torch.no_grad()
    def prefill(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Read a prompt [1, s]: logits after its last token [1, V] and features [1, s, L*H]."""
        self._before = None
        return self._pass(tokens, last_only=True)

    @torch.no_grad()
    def score(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Read a block [1, s]: logits after each token [s, V] and features [1, s, L*H]. Follow with `keep`."""
        layers = self._cache.layers
        croppable = all(type(layer) is DynamicLayer for layer in layers)
        # DynamicLayer replaces its tensors, the others write into theirs.
        self._before = None if croppable else [_copied(layer) for layer in layers]
        return self._pass(tokens, last_only=False)

    @torch.no_grad()
    def keep(self, count: int) -> None:
        """Keep only the first `count` >= 1 tokens of the last `score`."""
        dropped = self._tokens.shape[1] - count
        if dropped and self._before is None:
            self._cache.crop(-dropped)
        elif dropped and self._before is not None:
            self._cache.layers = self._before
            self._pass(self._tokens[:, :count], last_only=True)

    def _pass(self, tokens: Tensor, last_only: bool) -> tuple[Tensor, Tensor]:
        self._tokens, self._captured = tokens, []
        options = {self._cache_name: self._cache, "use_cache": True, "logits_to_keep": int(last_only)}
        logits: Tensor = self.model(input_ids=tokens, **options).logits
        return logits[0], torch.cat(self._captured, -1)

    def _hook(self) -> Callable[[nn.Module, object, object], None]:
        def hook(_module: nn.Module, _inputs: object, output: object) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            assert isinstance(hidden, Tensor)
            self._captured.append(hidden)

        return hook


def _copied(layer: Any) -> Any:
    return copy.copy(layer) if type(layer) is DynamicLayer else copy.deepcopy(layer)


def load_verifying_target(
    folder: Path, layer_ids: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> VerifyingTarget:
    """Load a local Hugging Face folder whole; no code of the folder is run.

    Raises:
        RecipeError: it cannot be loaded, or weights are absent (they would be random, in silence).
    """
    model = load_frozen(AutoModelForCausalLM, folder, dtype)
    return VerifyingTarget(model.to(device), layer_ids)
