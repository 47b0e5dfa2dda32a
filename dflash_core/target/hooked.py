"""The frozen target: what the drafter's context features, embedding and lm_head come from.

Only layers up to the deepest captured one are loaded, and no lm_head with them. The features are taken by forward
hooks, because the truncated model's own last hidden state is already normed: the output of decoder layer i is
`hidden_states[i + 1]` of the whole model, bit for bit. The trade-off: hooks copy while the target still runs (so the
copy can go to another device at once), but nothing can be captured but whole layer outputs.

Shapes: B rows, S tokens, L captured layers, H hidden size, V vocabulary.
"""

import importlib.util
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import AutoConfig, AutoModel, masking_utils
from transformers.utils import logging as transformers_logging

from dflash_core.errors import IncompatibleError, RecipeError
from dflash_core.target.files import safetensors_files

log = logging.getLogger(__name__)

KERNELS = {"fla": "flash-linear-attention", "causal_conv1d": "causal-conv1d"}
"""Modules that linear-attention layers are fast with on CUDA, and their packages; the extra `gpu` names them."""

Sink = Callable[[int, torch.Tensor], None]
"""Takes (j, output [B, S, H] of the j-th captured layer) while the target is still running."""


def hook_layers(layers: nn.Module, layer_ids: Sequence[int], sink: Sink) -> list[RemovableHandle]:
    """Have the outputs of decoder layers handed to a sink at every pass, until the handles are removed.

    Layer i's output is `hidden_states[i + 1]` of transformers, before the final norm. Some architectures return it
    alone, some first in a tuple.
    """

    def hook(position: int) -> Callable[[nn.Module, object, object], None]:
        def take(_module: nn.Module, _inputs: object, output: object) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            assert isinstance(hidden, torch.Tensor)
            sink(position, hidden)

        return take

    return [
        layers.get_submodule(str(layer)).register_forward_hook(hook(position))
        for position, layer in enumerate(layer_ids)
    ]


class HookedTarget:
    """A truncated backbone in evaluation mode whose captured layers are handed to a sink."""

    def __init__(self, backbone: nn.Module, layer_ids: tuple[int, ...], device: torch.device) -> None:
        self.backbone = backbone
        self.layer_ids = layer_ids
        self.device = device
        self._sink: Sink | None = None
        hook_layers(backbone.get_submodule("layers"), layer_ids, self._take)

    def _take(self, position: int, hidden: torch.Tensor) -> None:
        if self._sink is not None:  # else an acceptance probe runs the same model
            self._sink(position, hidden)

    @torch.no_grad()
    def capture(self, ids: torch.Tensor, sink: Sink) -> None:
        """Run right-padded `ids` [B, S], one document a row, and hand each captured layer's output to `sink`.

        No attention mask is needed: attention, convolution and recurrence are causal, so padding on the right changes
        no real token. Packed rows are not supported: linear-attention layers would leak from one document into another.
        """
        self._sink = sink
        try:
            with _rows_are_documents():
                self.backbone(input_ids=ids, use_cache=False)
        finally:
            self._sink = None

    def features(self, ids: torch.Tensor) -> torch.Tensor:
        """Context features [B, S, L*H] of right-padded `ids` [B, S], on the target's device."""
        parts: list[torch.Tensor] = []
        self.capture(ids, lambda _position, hidden: parts.append(hidden))
        return torch.cat(parts, dim=-1)


def load_target(folder: Path, layer_ids: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> HookedTarget:
    """Load the backbone of a local Hugging Face folder up to its deepest captured layer.

    Args:
        folder: config.json and safetensors, sharded or not; code in it is never run.
        layer_ids: decoder layers to capture, ascending.

    Raises:
        RecipeError: the folder is not there, incomplete, or of an architecture that transformers does not have.
        IncompatibleError: the model has no such layer.
    """
    safetensors_files(folder)  # refuses a folder that is not there or holds none, by name
    config = load_config(folder).get_text_config()
    if layer_ids[-1] >= config.num_hidden_layers:
        raise IncompatibleError(
            f"target layer {layer_ids[-1]} does not exist in {folder}, which has layers 0 to "
            f"{config.num_hidden_layers - 1}; correct target.layer_ids"
        )
    config.num_hidden_layers = layer_ids[-1] + 1
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    backbone = load_frozen(AutoModel, folder, dtype, config)
    return HookedTarget(backbone.eval().to(device), layer_ids, device)


def load_config(folder: Path) -> Any:
    """The transformers config of a local Hugging Face folder.

    Raises:
        RecipeError: there is none, or of an architecture that transformers does not have.
    """
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise RecipeError(f"target.path {folder}: its config.json cannot be used: {error}") from None


def load_frozen(auto: Any, folder: Path, dtype: torch.dtype, config: Any = None) -> Any:
    """A transformers model, every weight present and none trainable; safetensors only, no code of the folder run.

    Args:
        auto: the transformers class that loads it, for example AutoModel.
        config: instead of the folder's own; None: the folder's own.

    Raises:
        RecipeError: it cannot be loaded, or weights are absent (they would be random, and nobody would notice).
    """
    with quiet_transformers():
        try:
            model, report = auto.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
            )
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise RecipeError(f"target.path {folder} cannot be loaded: {error}") from None
    absent = sorted(report["missing_keys"]) + sorted(str(key) for key in report["mismatched_keys"])
    if absent:
        raise RecipeError(
            f"target.path {folder}: {len(absent)} weights are absent from its safetensors files or have another shape, "
            f"first {absent[0]}; download the folder again"
        )
    return model.requires_grad_(False)


def warn_of_slow_layers(target: HookedTarget, device_type: str) -> None:
    """Tell of linear-attention layers (Qwen3.5) that a GPU would run in transformers' reference implementation."""
    kinds = getattr(target.backbone.config, "layer_types", None) or ()
    missing = [package for module, package in KERNELS.items() if importlib.util.find_spec(module) is None]
    if device_type == "cuda" and "linear_attention" in kinds and missing:
        log.warning(
            "%d of the target's %d layers are linear attention and run in plain PyTorch, right but much slower, "
            "without %s; install what the extra gpu names: pip install '.[gpu]'",
            sum(kind == "linear_attention" for kind in kinds),
            len(kinds),
            " and ".join(missing),
        )


@contextmanager
def _rows_are_documents() -> Iterator[None]:
    """Spares transformers its search for packed rows, whose answer it waits for the device to give at every pass.

    It has no switch for that: an attention mask makes it wait, too, and one made beforehand costs the fast kernels.
    """
    search = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = search


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """The cut layers would be reported as unexpected weights; what is really absent is checked by the caller."""
    verbosity, progress = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(logging.ERROR)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if progress:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]
