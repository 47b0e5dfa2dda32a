"""The drafter's shape, in the published config.json form and as derived from a recipe and a target.

The trade-off: only the keys that change a number are held as fields; keys that this architecture fixes (no attention
bias, SiLU, plain RoPE) are written as constants and refused when a file says otherwise, since a server would obey them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dflash_core.errors import IncompatibleError
from dflash_core.recipe import Recipe
from dflash_core.target.files import text_config, ties_embeddings

LayerType = Literal["full_attention", "sliding_attention"]
TokenId = int | list[int] | None

FAMILY_MASK_IDS = {"qwen3_5": 248070, "qwen3": 151669}
"""Unused rows of the embedding that published drafters of a family take as mask token; by prefix of model_type."""

_FIXED: dict[str, object] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "rope_scaling": None,
}


@dataclass(frozen=True)
class DrafterConfig:
    """Everything that decides the drafter's tensors and numbers.

    Raises:
        IncompatibleError: the fields contradict each other or name rows or layers the target does not have.
    """

    vocab_size: int
    """The target's."""
    hidden_size: int
    """The target's: embedding and lm_head are shared."""
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_hidden_layers: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    """Feature i is the output of decoder layer `target_layer_ids[i]`, counted from 0."""
    num_target_layers: int
    layer_types: tuple[LayerType, ...]
    sliding_window: int | None = None
    rope_theta: float = 1_000_000.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 40_960
    tie_word_embeddings: bool = False
    dtype: str = "float32"
    bos_token_id: TokenId = None
    eos_token_id: TokenId = None
    pad_token_id: TokenId = None

    def __post_init__(self) -> None:
        ids, last = self.target_layer_ids, self.num_target_layers - 1
        if not ids or list(ids) != sorted(set(ids)) or ids[0] < 0 or ids[-1] > last:
            raise IncompatibleError(f"target_layer_ids {list(ids)} must ascend within the target's layers 0..{last}")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise IncompatibleError(
                f"mask_token_id {self.mask_token_id} is not a row of the target's embedding, which has "
                f"{self.vocab_size}; set drafter.mask_token_id"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise IncompatibleError(
                f"{self.num_attention_heads} attention heads cannot share {self.num_key_value_heads} key-value heads"
            )
        if self.head_dim % 2 or self.block_size < 2:
            raise IncompatibleError(f"head_dim {self.head_dim} must be even, block_size {self.block_size} at least 2")
        if len(self.layer_types) != self.num_hidden_layers:
            raise IncompatibleError(f"{len(self.layer_types)} layer_types for {self.num_hidden_layers} layers")
        if "sliding_attention" in self.layer_types and not self.sliding_window:
            raise IncompatibleError("layer_types names sliding_attention but sliding_window is not set")

    @property
    def feature_size(self) -> int:
        """Width of the concatenated features, L*H."""
        return len(self.target_layer_ids) * self.hidden_size

    def window(self, layer: int) -> int | None:
        """Window of drafter layer `layer` in tokens, the query counted; None: full attention."""
        return self.sliding_window if self.layer_types[layer] == "sliding_attention" else None

    def to_json(self) -> dict[str, Any]:
        """The published config.json, keys in its order."""
        sliding = "sliding_attention" in self.layer_types
        return {
            "architectures": ["DFlashDraftModel"],
            "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
            "model_type": "qwen3",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "dtype": self.dtype,
            "rope_theta": self.rope_theta,
            "rope_scaling": None,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": self.eos_token_id,
            "pad_token_id": self.pad_token_id,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_position_embeddings,
            "tie_word_embeddings": self.tie_word_embeddings,
            "num_hidden_layers": self.num_hidden_layers,
            "block_size": self.block_size,
            "num_target_layers": self.num_target_layers,
            "dflash_config": {
                "mask_token_id": self.mask_token_id,
                "target_layer_ids": list(self.target_layer_ids),
            },
            "layer_types": list(self.layer_types),
            "use_sliding_window": sliding,
            "sliding_window": self.sliding_window if sliding else None,
            "max_window_layers": self.num_hidden_layers,
        }

    @classmethod
    def from_json(cls, table: Mapping[str, Any]) -> "DrafterConfig":
        """Read a published config.json; keys that change no number (transformers_version, use_cache, ...) are ignored.

        Raises:
            IncompatibleError: a key is missing, or asks for something this architecture does not have.
        """
        if table.get("architectures") != ["DFlashDraftModel"]:
            raise IncompatibleError(f"architectures is {table.get('architectures')}, not ['DFlashDraftModel']")
        for key, fixed in _FIXED.items():
            if table.get(key, fixed) != fixed:
                raise IncompatibleError(f"drafter config has {key} = {table[key]!r}; only {fixed!r} is supported")
        rope = table.get("rope_parameters") or {}
        if rope.get("rope_type", "default") != "default":
            raise IncompatibleError(f"drafter config has rope_type {rope['rope_type']!r}; only plain RoPE is supported")
        try:
            return cls(
                **{key: table[key] for key in _REQUIRED},
                **{key: table[key] for key in _OPTIONAL if key in table},
                rope_theta=table["rope_theta"] if "rope_theta" in table else rope["rope_theta"],
                layer_types=tuple(table["layer_types"]),
                mask_token_id=table["dflash_config"]["mask_token_id"],
                target_layer_ids=tuple(table["dflash_config"]["target_layer_ids"]),
            )
        except KeyError as error:
            raise IncompatibleError(f"drafter config has no key {error}; it is no published DFlash config") from None


_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_hidden_layers",
    "block_size",
    "num_target_layers",
)
_OPTIONAL = (
    "sliding_window",
    "rms_norm_eps",
    "max_position_embeddings",
    "tie_word_embeddings",
    "dtype",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)


def layer_ids(num_target_layers: int, layers: int) -> tuple[int, ...]:
    """Captured target layers, spread over its depth: round(1 + j*(n-4)/(d-1)), as published; n//2 for one.

    Raises:
        IncompatibleError: the target is too shallow for that many different layers.
    """
    n, d = num_target_layers, layers
    ids = (n // 2,) if d == 1 else tuple(round(1 + j * (n - 4) / (d - 1)) for j in range(d))
    if len(set(ids)) < d or ids[0] < 0 or ids[-1] >= n:
        raise IncompatibleError(f"a target of {n} layers has no {d} layers to spread; set target.layers or layer_ids")
    return ids


def check_fit(config: DrafterConfig, target_config: Mapping[str, Any]) -> None:
    """Refuse a drafter that was made for another target.

    Raises:
        IncompatibleError: hidden size, vocabulary or depth differ; the message holds both values.
    """
    text = text_config(target_config)
    for ours, theirs, what in (
        (config.hidden_size, text["hidden_size"], "hidden size"),
        (config.vocab_size, text["vocab_size"], "vocabulary"),
        (config.num_target_layers, text["num_hidden_layers"], "number of target layers"),
    ):
        if ours != theirs:
            raise IncompatibleError(
                f"the drafter was made for a target with {what} {ours}, this target has {theirs}; "
                "use the target that it was trained with"
            )


def drafter_config(recipe: Recipe, target_config: Mapping[str, Any], tokenizer_mask: int | None) -> DrafterConfig:
    """The drafter that the recipe describes for this target; what it leaves open is taken from the target.

    RoPE is the drafter's own, over its whole head_dim: the target's head_dim is not inherited (64 for narrow models,
    else 128, sizes every serving engine knows), nor are partial rotary factors and mrope sections.

    Args:
        recipe: supplies the drafter, target and export tables.
        target_config: the target's config.json.
        tokenizer_mask: see `tokenizer_mask_id`.

    Raises:
        IncompatibleError: recipe and target contradict each other; the message holds both values.
    """
    wanted, text = recipe.drafter, text_config(target_config)
    hidden: int = text["hidden_size"]
    if wanted.hidden_size not in (None, hidden):
        raise IncompatibleError(
            f"drafter.hidden_size {wanted.hidden_size} differs from the target's {hidden}; they share the embedding"
        )
    head_dim = wanted.head_dim or (128 if hidden >= 1024 else 64)
    same_heads = text.get("head_dim") == head_dim or hidden == head_dim * text["num_attention_heads"]
    heads = wanted.num_attention_heads or (text["num_attention_heads"] if same_heads else max(1, hidden // head_dim))
    target_kv: int = text.get("num_key_value_heads") or text["num_attention_heads"]
    sliding = min(wanted.sliding_layers, wanted.num_layers)
    if sliding and wanted.sliding_window is None:
        raise IncompatibleError(f"drafter.sliding_layers is {sliding} but drafter.sliding_window is not set")
    layers: int = text["num_hidden_layers"]
    rope = text.get("rope_parameters") or {}
    types: list[LayerType] = [
        "sliding_attention" if i < sliding else "full_attention" for i in range(wanted.num_layers)
    ]
    return DrafterConfig(
        vocab_size=text["vocab_size"],
        hidden_size=hidden,
        intermediate_size=wanted.intermediate_size or text["intermediate_size"],
        num_attention_heads=heads,
        num_key_value_heads=wanted.num_key_value_heads or (target_kv if heads % target_kv == 0 else heads),
        head_dim=head_dim,
        num_hidden_layers=wanted.num_layers,
        block_size=wanted.block_size,
        mask_token_id=_mask_token_id(recipe, text, tokenizer_mask),
        target_layer_ids=recipe.target.layer_ids or layer_ids(layers, recipe.target.layers),
        num_target_layers=layers,
        layer_types=tuple(types),
        sliding_window=wanted.sliding_window if sliding else None,
        rope_theta=wanted.rope_theta or text.get("rope_theta") or rope.get("rope_theta") or 1_000_000.0,
        rms_norm_eps=text.get("rms_norm_eps", 1e-6),
        max_position_embeddings=text.get("max_position_embeddings", 40_960),
        tie_word_embeddings=ties_embeddings(target_config),
        bos_token_id=text.get("bos_token_id"),
        eos_token_id=text.get("eos_token_id"),
        pad_token_id=text.get("pad_token_id"),
    )


def _mask_token_id(recipe: Recipe, text: Mapping[str, Any], tokenizer_mask: int | None) -> int:
    """Recipe, else the tokenizer's own, else the known one of the family."""
    if recipe.drafter.mask_token_id is not None:
        return recipe.drafter.mask_token_id
    if tokenizer_mask is not None:
        return tokenizer_mask
    kind = str(text.get("model_type", ""))
    for family, mask in FAMILY_MASK_IDS.items():
        if kind.startswith(family) and mask < text["vocab_size"]:
            return mask
    raise IncompatibleError(
        f"the tokenizer has no mask token and none is known for a {kind or 'nameless'} target of {text['vocab_size']} "
        "tokens; set drafter.mask_token_id to a row of its embedding that no text uses"
    )
