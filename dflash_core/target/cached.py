"""The whole target with its cache, for several sequences at once: scores blocks, hands out features, forgets the rest.

The trade-off: attention caches are shortened; states that cannot be (linear attention) are kept from before the block
and the accepted tokens run again, one pass for each number of accepted tokens, which needs nothing from the
architecture. Prompts are read one by one, so no state ever sees padding.
Shapes: B rows, s tokens of a pass, L captured layers, H hidden size, V vocabulary.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.utils import GENERATION_CONFIG_NAME

from dflash_core.errors import RecipeError
from dflash_core.target.cached_rows import CachedRows
from dflash_core.target.hooked import hook_layers, load_config, load_frozen


class CachedTarget:
    """Rows of tokens that it has read, nothing trained."""

    def __init__(self, model: nn.Module, layer_ids: tuple[int, ...]) -> None:
        """
        Args:
            model: a Hugging Face causal LM, untruncated.
            layer_ids: decoder layers whose outputs are the features, ascending.
        """
        self.device = next(model.parameters()).device
        self.model = cast(Any, model.eval())
        self.layer_ids = layer_ids
        # transformers 5.40 drops the older name, earlier releases do not know the newer.
        names = inspect.signature(self.model.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"
        self._config = self.model.config.get_text_config()
        self.begin()

    @property
    def stop_tokens(self) -> frozenset[int]:
        """Tokens that end an answer, from the generation config and the model's config."""
        return _all_of(self.model.generation_config.eos_token_id, self._config.eos_token_id)

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
        """Forget every row."""
        self._rows = CachedRows([], [])
        self._tokens = torch.empty(0, 0, dtype=torch.int64, device=self.device)
        self._before: CachedRows | None = None

    def admit(self, prompt: Tensor) -> tuple[Tensor, Tensor]:
        """Read a prompt [1, s] into a new last row: logits after its last token [V] and features [1, s, L*H]."""
        row = CachedRows.empty(self._config)
        logits, features = self._pass(row, prompt, last_only=True)
        row.lengths = [prompt.shape[1]]
        self._rows = self._rows.join(row)
        return logits[0, -1], features

    def score(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Read a block [B, s]: logits after each token [B, s, V] and features [B, s, L*H]. Follow with `keep`."""
        self._tokens = tokens
        rejectable = self._rows.has_states and tokens.shape[1] > 1
        self._before = self._rows.select(range(len(self._rows.lengths))) if rejectable else None
        return self._pass(self._rows, tokens, last_only=False)

    def keep(self, counts: Sequence[int]) -> None:
        """Keep only the first `counts[b]` >= 1 tokens of row b of the last `score`."""
        read = self._tokens.shape[1]
        if min(counts) == read:
            self._rows.lengths = [length + read for length in self._rows.lengths]
        elif self._before is None:
            self._rows.shorten(counts)
        else:
            self._rows = self._read_again(self._before, counts)
        self._before = None

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows only, in this order."""
        self._rows = self._rows.select(rows)

    def features(self, tokens: Tensor, layer_ids: Sequence[int]) -> dict[int, Tensor]:
        """Outputs [B, s, H] of any layers for right-padded `tokens` [B, s], apart from the rows."""
        with self._captured(layer_ids) as outputs, torch.no_grad():
            self.model(input_ids=tokens, use_cache=False, logits_to_keep=1)
        return outputs

    def _read_again(self, before: CachedRows, counts: Sequence[int]) -> CachedRows:
        """The rows as if only the kept tokens had been read."""
        # A linear layer's state has the refused tokens in it, and nothing takes them out again. So the states from
        # before the block read the kept tokens once more. A pass takes rows of one length only (padding would enter a
        # state), hence one pass for each number of kept tokens; rows that kept the whole block are right as they are.
        # The groups come out in another order than the rows, which the last line restores.
        parts, order = CachedRows([], []), list[int]()
        for count in sorted(set(counts)):
            members = [row for row, kept in enumerate(counts) if kept == count]
            part = (self._rows if count == self._tokens.shape[1] else before).select(members)
            if count < self._tokens.shape[1]:
                self._pass(part, self._tokens[members, :count], last_only=True)
            part.lengths = [length + count for length in part.lengths]
            parts, order = parts.join(part), order + members
        return parts.select([order.index(row) for row in range(len(counts))])

    @torch.no_grad()
    def _pass(self, rows: CachedRows, tokens: Tensor, last_only: bool) -> tuple[Tensor, Tensor]:
        """Read `tokens` into the layers of `rows`; their lengths are the caller's to move."""
        options: dict[str, Any] = {self._cache_name: rows.as_cache(), "use_cache": True}
        mask = rows.mask(tokens.shape[1], self.device)
        if mask is not None:
            starts = torch.tensor(rows.lengths, device=self.device)
            options |= {
                "attention_mask": mask,
                "position_ids": starts[:, None] + torch.arange(tokens.shape[1], device=self.device),
            }
        with self._captured(self.layer_ids) as outputs:
            logits: Tensor = self.model(input_ids=tokens, logits_to_keep=int(last_only), **options).logits
        return logits, torch.cat([outputs[layer] for layer in self.layer_ids], -1)

    @contextmanager
    def _captured(self, layer_ids: Sequence[int]) -> Iterator[dict[int, Tensor]]:
        """Outputs of the layers, filled while the model runs."""
        outputs: dict[int, Tensor] = {}

        def take(position: int, hidden: Tensor) -> None:
            outputs[layer_ids[position]] = hidden

        handles = hook_layers(self.model.get_decoder().layers, layer_ids, take)
        try:
            yield outputs
        finally:
            for handle in handles:
                handle.remove()


def named_stop_tokens(folder: Path) -> frozenset[int]:
    """`CachedTarget.stop_tokens` of a local Hugging Face folder, without loading its weights.

    Raises:
        RecipeError: its config.json or generation_config.json cannot be used.
    """
    config = load_config(folder)
    try:
        generation = GenerationConfig.from_pretrained(folder, local_files_only=True)
    except OSError as error:
        if (folder / GENERATION_CONFIG_NAME).exists():
            raise RecipeError(f"target.path {folder}: its {GENERATION_CONFIG_NAME} cannot be used: {error}") from None
        generation = GenerationConfig.from_model_config(config)  # as transformers does when it loads the model
    return _all_of(generation.eos_token_id, config.get_text_config().eos_token_id)


def _all_of(*named: int | list[int] | None) -> frozenset[int]:
    return frozenset(token for entry in named for token in ([entry] if isinstance(entry, int) else entry or []))


def load_cached_target(
    folder: Path, layer_ids: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> CachedTarget:
    """Load a local Hugging Face folder whole; no code of the folder is run.

    Raises:
        RecipeError: it cannot be loaded, or weights are absent (they would be random, and nobody would notice).
    """
    model = load_frozen(AutoModelForCausalLM, folder, dtype)
    return CachedTarget(model.to(device), layer_ids)
