"""A vLLM worker extension, loaded inside vLLM's own environment: cures the drafter's context keys on its CPU build.

vLLM normalises the context keys of all drafter layers in one call with one weight row a layer; its CPU kernel reads row
0 only, so every layer gets the first one's `k_norm`: output stays lossless, acceptance drops. Here it is one call a
layer. Builds for GPUs are left as they are. Imports nothing of ours: this folder alone is on vLLM's path.
"""

import torch
from vllm import _custom_ops as ops
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model
from vllm.platforms import current_platform


class ContextKeys:
    """Named by `--worker-extension-cls`; vLLM mixes it into its worker, which has nothing to gain but the import."""


def _normalize_context_k(self: DFlashQwen3Model, all_k: torch.Tensor) -> torch.Tensor:
    """RMS-normalise keys [layers, tokens, key-value heads, head_dim], each layer with its own weight."""
    normed = torch.empty_like(all_k)
    for layer, weight in enumerate(self._k_norm_weights):
        ops.rms_norm(normed[layer], all_k[layer], weight, self._rms_norm_eps)
    return normed


if current_platform.is_cpu():
    DFlashQwen3Model._normalize_context_k = _normalize_context_k
