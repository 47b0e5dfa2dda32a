"""The same drafter in the form of vLLM's `speculators` library: one folder that names its target and brings its ends.

Facts of that form: the network's shape is nested under `transformer_layer_config`; `aux_hidden_state_layer_ids` counts
from the embedding, so it is our layer id plus one; embedding and lm_head are in the weights. The trade-off: a folder
that can be served without naming the target costs the target's two largest matrices, 5 GB in bf16 for a 27B one.
Shapes: V vocabulary, H hidden size.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_core.drafter.config import DrafterConfig
from dflash_core.drafter.folder import SHARD_BYTES, check_state, write_json, write_weights
from dflash_core.storage.layout import CONFIG_FILE
from dflash_core.target.files import load_head, read_target_config

FOLDER = "speculators"
NOT_OF_THE_NETWORK = {"architectures", "auto_map", "block_size", "dflash_config", "num_target_layers", "dtype"}


def save_speculators(
    folder: Path,
    config: DrafterConfig,
    state: Mapping[str, Tensor],
    dtype: torch.dtype,
    target: Path,
    shard_bytes: int = SHARD_BYTES,
) -> list[Path]:
    """Write config.json and weights into an existing folder, each file synced to disk.

    Args:
        folder: existing; files of the same names are replaced.
        config: the drafter's.
        state: exactly the drafter's tensors.
        dtype: of all written weights.
        target: the folder embedding [V, H] and lm_head [V, H] are read from; its path is what vLLM serves by default.
        shard_bytes: weights beyond this are split over several files with an index.

    Returns:
        The files written, config.json first.
    """
    check_state(config, state, "the drafter to save")
    head = load_head(target, dtype, torch.device("cpu"))
    ends = {"embed_tokens.weight": head.embedding, "lm_head.weight": head.lm_head.clone()}
    table = speculators_config(config, read_target_config(target), str(target))
    written = write_json(folder / CONFIG_FILE, table | {"dtype": str(dtype).removeprefix("torch.")})
    return [written, *write_weights(folder, {**state, **ends}, dtype, shard_bytes)]


def speculators_config(config: DrafterConfig, target_config: Mapping[str, Any], target: str) -> dict[str, Any]:
    """Its config.json.

    `sliding_window_non_causal` is about sliding layers only, which are causal inside the block here. vLLM 0.32 applies
    it to every layer, so it is true where there is no sliding layer.
    """
    proposal = {"proposal_type": "greedy", "speculative_tokens": config.block_size - 1, "verifier_accept_k": 1}
    return {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "block_size": config.block_size,
        "draft_vocab_size": config.vocab_size,
        "aux_hidden_state_layer_ids": [layer + 1 for layer in config.target_layer_ids],
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": False,
        "sliding_window_non_causal": "sliding_attention" not in config.layer_types,
        "tie_word_embeddings": False,
        "transformer_layer_config": {k: v for k, v in config.to_json().items() if k not in NOT_OF_THE_NETWORK},
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [{**proposal, "accept_tolerance": 0.0}],
            "verifier": {"name_or_path": target, "architectures": target_config.get("architectures", [])},
        },
    }
