"""The training half of the recipe: the drafter, its training, evaluation and export."""

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from dflash_core.recipe.base import Decides, DecidesNothing, Positive, Section, Share, Use


class DrafterSettings(Section):
    """Shape of the drafter (block-diffusion draft model). None: taken from the target's config."""

    decides: ClassVar[tuple[Use, ...]] = ("weights",)
    block_size: Annotated[int, Field(ge=2)] = 16
    num_layers: Positive = 5
    mask_token_id: int | None = Field(None, ge=0)
    """An existing row of the target's embedding. None: the tokenizer's mask token, else the known one of the family."""
    hidden_size: Positive | None = None
    intermediate_size: Positive | None = None
    num_attention_heads: Positive | None = None
    num_key_value_heads: Positive | None = None
    head_dim: Positive | None = None
    rope_theta: float | None = Field(None, gt=0)
    sliding_window: Positive | None = None
    sliding_layers: int = Field(0, ge=0)
    """The first this many layers use sliding-window attention."""
    warm_start: Annotated[Path | None, DecidesNothing] = None
    """A drafter folder in the published format to start from. Its content decides."""


class PlacementSettings(Section):
    """Which device runs what: target i feeds drafter i modulo the number of drafters. One process per drafter."""

    decides: ClassVar[tuple[Use, ...]] = ()
    targets: tuple[str, ...] = ("cpu",)
    drafters: tuple[str, ...] = ("cpu",)
    threads: int = Field(1, ge=0)
    """CPU threads per process; 0: torch's default."""
    timeout_s: float = Field(45.0, gt=0)
    """How long a process waits for the others in a step before it takes one for dead and ends the run."""

    @model_validator(mode="after")
    def _pairs(self) -> "PlacementSettings":
        if not self.targets or not self.drafters:
            raise ValueError("needs at least one target and one drafter device")
        if len(self.targets) % len(self.drafters):
            raise ValueError(f"{len(self.targets)} targets cannot be shared evenly by {len(self.drafters)} drafters")
        return self


class TrainingSettings(Section):
    """Online training of the drafter against the hooked target."""

    decides: ClassVar[tuple[Use, ...]] = ("weights",)
    epochs: Positive = 6
    max_steps: Positive | None = None
    """Ends the run earlier than `epochs` would."""
    batch_rows: Annotated[Positive, DecidesNothing] = 8
    """Rows of one micro-batch on one drafter. What decides is the rows of a step over all drafters, see `step_rows`."""
    accumulation: Annotated[Positive, DecidesNothing] = 1
    anchors: Positive = 512
    """Blocks drawn per row and epoch."""
    learning_rate: float = Field(6e-4, gt=0)
    warmup_share: Share = 0.04
    weight_decay: float = Field(0.0, ge=0)
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = Field(1.0, gt=0)
    schedule: Literal["cosine", "wsd"] = "cosine"
    loss: Literal["decay", "dpace"] = "decay"
    gamma: float | None = Field(None, gt=0)
    """Decay of the slot weights; None: 7, 5 or 4 by block size, as published."""
    dpace_alpha: Share = 0.5
    vocabulary_chunk_rows: Annotated[Positive, DecidesNothing] = 1024
    """Rows of logits held at once by the objective."""
    held_out_share: Annotated[Share, Decides("weights", "acceptance")] = 0.02
    """Rows kept away from training, chosen by (seed, conversation); evaluation draws its prompts from them."""
    validate_every_steps: Annotated[Positive, DecidesNothing] = 200
    validation_rows: Annotated[Positive, DecidesNothing] = 256
    """At most this many held-out rows are validated on."""
    acceptance_every_steps: Annotated[int, DecidesNothing] = Field(0, ge=0)
    """Decode a few held-out prompts with the drafter as it is, every so many steps; 0: never. The whole target is then
    loaded on the first target device, instead of its layers up to the deepest captured one."""
    acceptance_prompts: Annotated[Positive, DecidesNothing] = 8
    trackers: Annotated[tuple[Literal["tensorboard", "wandb", "mlflow"], ...], DecidesNothing] = ("tensorboard",)
    """Where numbers go besides the JSON lines; wandb and mlflow need their packages and their own configuration."""
    checkpoint_every_steps: Annotated[Positive, DecidesNothing] = 200
    keep_checkpoints: Annotated[Positive, DecidesNothing] = 2
    """The last ones; the one with the longest held-out accepted prefix is kept besides."""
    publish: Literal["last", "best"] = "last"
    """Which weights become the drafter: those after the last step, or those of the best checkpoint."""
    skips_before_stop: Annotated[Positive, DecidesNothing] = 10
    """Consecutive steps with a non-finite loss or gradient that end the run."""
    max_bad_row_share: Annotated[Share, DecidesNothing] = 0.01
    """Rows left out because the target gave non-finite features; more of them end the run."""
    gradient_checkpointing: Annotated[bool, DecidesNothing] = False
    autocast: bool = True
    """bfloat16 autocast on CUDA; masters and moments are fp32 always."""
    placement: PlacementSettings = PlacementSettings()


class EvaluationSettings(Section):
    """Draft-and-verify decoding on held-out prompts."""

    decides: ClassVar[tuple[Use, ...]] = ("acceptance",)
    prompts: Positive = 64
    max_new_tokens: Positive = 256
    temperature: float = Field(0.0, ge=0)
    min_acceptance_length: Annotated[float, DecidesNothing] = Field(2.0, ge=1)
    ngram: Positive = 3
    """Order of the n-gram drafter that the drafter is compared with."""
    block_size: Annotated[int, Field(ge=2)] | None = None
    """As served, at most the trained one; None: the trained one."""
    timed_prompts: Positive = 16
    """This many of the prompts are decoded one at a time, with and without the drafter, for the speeds."""
    batch: Positive = 8
    """Prompts decoded together where no speed is measured."""
    cut_temperatures: tuple[Annotated[float, Field(ge=0)], ...] = (0.0, 1.0)
    """Temperatures that the drafter and its rivals are measured at, too, `temperature` itself left out."""
    cut_prompts: Positive = 16
    """The first this many prompts are decoded for each further temperature and thinking state."""


class ExportSettings(Section):
    """The drafter folder that serving engines load."""

    decides: ClassVar[tuple[Use, ...]] = ()
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    local_dir: Path | None = None
    """Also written to this folder; None: S3 only."""
    speculators: bool = True
    """Also in the form of vLLM's speculators library, in the folder speculators/; it holds embedding and lm_head."""
