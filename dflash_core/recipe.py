"""The recipe: one TOML file describes one complete run, validated here once and trusted everywhere else.

Unknown keys are refused, paths are resolved against the working directory, and every field has its unit in its name or
its docstring. Nothing below this module reads the environment (boto3 itself reads the standard AWS variables).
"""

import tomllib
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, model_validator

from dflash_core.errors import RecipeError

Share = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[int, Field(gt=0)]
Cron = Annotated[str, Field(pattern=r"^\S+( \S+){4}$")]
TemplateOption = bool | int | float | str


class Section(BaseModel):
    """A table of the recipe: frozen, and a misspelt key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Source(Section):
    """Where the completions lie: every object below `prefix` ending in .jsonl, .jsonl.gz or .jsonl.zst."""

    bucket: str
    prefix: str = ""


class Storage(Section):
    """Where everything derived goes, and how the object store is reached (credentials: the standard AWS variables)."""

    bucket: str
    prefix: str = ""
    endpoint_url: str | None = None
    region: str | None = None
    embedded_store: Path | None = None
    """Use the embedded object store with its data in this folder, started where it does not run yet."""
    work_dir: Path = Path(".dflash/work")
    """Local scratch: memory-mapped shards and training checkpoints on their way to S3."""
    downloads: Positive = 32
    """Downloads in flight over all worker processes together."""
    uploads: Positive = 32
    """Uploads in flight over all worker processes together."""
    attempts: Positive = 5
    connect_timeout_s: float = Field(10.0, gt=0)
    read_timeout_s: float = Field(60.0, gt=0)
    request_checksums: bool = True
    """Off for object stores that refuse the x-amz-checksum headers of recent SDKs."""

    @model_validator(mode="after")
    def _one_store(self) -> "Storage":
        if self.embedded_store is not None and self.endpoint_url is not None:
            raise ValueError("give embedded_store or endpoint_url, not both")
        return self


class Target(Section):
    """The frozen target model: a local Hugging Face folder (config.json, tokenizer, safetensors)."""

    path: Path
    layer_ids: tuple[int, ...] | None = None
    """Decoder layers whose outputs the drafter sees; None: `layers` of them, spread as in section 2 of the paper."""
    layers: Positive = 5
    dtype: Literal["float32", "bfloat16"] = "bfloat16"


class Tokenization(Section):
    """Completions -> token ids and loss masks. All but `backend`, `audit_share`, `workers` enters the fingerprint."""

    tokenizer: Path | None = None
    """A tokenizer folder (config.json beside it); None: the target's."""
    chat_template: Path | None = None
    """A Jinja file that replaces the tokenizer's own chat template; give the one that serving uses."""
    template_options: dict[str, TemplateOption] = Field(default_factory=dict)
    """Options of the chat template, as serving passes them, for example enable_thinking."""
    max_length: Positive = 4096
    """Tokens in a row, prompt included."""
    truncation: Literal["cut", "drop"] = "cut"
    """A longer row is cut at the right and marked "no terminator", or dropped and counted."""
    turns: Literal["all", "last"] = "all"
    """One row per assistant turn, each rendered as inference saw it, or the last turn only."""
    truncated_thinking: Literal["keep", "reject"] = "keep"
    """Rows whose answer ended by length inside the thought."""
    supervise_empty_thought: bool = True
    """Whether the template's empty think block before an answer without a thought counts in the loss."""
    repeats: Literal["keep", "drop"] = "keep"
    """Rows with the ids of an earlier row of their file; those of other files only count, in the gate."""
    min_supervised_tokens: Positive | None = None
    """Rows with fewer are dropped (and counted, by the gate too); None: twice the block size."""
    backend: Literal["auto", "fastokens", "huggingface"] = "auto"
    audit_share: Share = 0.001
    workers: int = Field(0, ge=0)
    """Worker processes; 0: one per core."""


class Gate(Section):
    """Thresholds of the gate between data and training. Shares are of rendered rows unless said otherwise."""

    near_empty_tokens: Positive = 16
    """A row with at most this many supervised tokens is near-empty."""
    max_near_empty_share: Share = 0.02
    """Over all files together, as are the other shares."""
    max_spike_share: Share = 0.5
    """Rows with one and the same number of supervised tokens (or within five neighbouring numbers)."""
    max_truncated_share: Share = 0.10
    """Rows that the engine ended at its token limit."""
    max_rejected_share: Share = 0.02
    """Of rows read."""
    max_dropped_share: Share = 0.25
    """Rows left out after rendering, for too few supervised tokens or too many tokens."""
    max_duplicate_share: Share = 0.05
    """Rows whose text occurred before, in this file or another."""
    file_factor: float = Field(5.0, ge=1)
    """One single file may have this many times each share."""
    min_median_supervised_tokens: int = Field(32, ge=0)
    min_coverage: Share = 0.95
    """Share of the source files that must be in the training set."""


class TrainingSetFiles(Section):
    """What goes into the training set."""

    files: tuple[str, ...] = ()
    """Keys, patterns ("part-0*") and ranges ("part-007..part-031"); none: every source file."""


class Automation(Section):
    """What Dagster does by itself once its schedules and sensors are switched on."""

    rerun_cron: Cron = "*/15 * * * *"
    """When failed files are tried again."""
    nightly_cron: Cron = "0 2 * * *"
    """When the whole lineage is brought up to date."""
    timezone: str = "UTC"
    max_attempts: Positive = 3
    """Tries of one version of a file, the first included; after them it is quarantined until released or replaced."""


class Alerts(Section):
    """Who is told of a failed run, at once."""

    webhook_url: SecretStr | None = None
    """A POST with JSON goes there; None: nobody is told. Never logged."""
    format: Literal["json", "slack"] = "json"
    ui_url: str | None = None
    """Where people reach the Dagster UI, for the link in the message."""
    timeout_s: float = Field(10.0, gt=0)


class Drafter(Section):
    """Shape of the drafter (block-diffusion draft model). None: taken from the target's config."""

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
    warm_start: Path | None = None
    """A drafter folder in the published format to start from."""


class Placement(Section):
    """Which device runs what: target i feeds drafter i modulo the number of drafters. One process per drafter."""

    targets: tuple[str, ...] = ("cpu",)
    drafters: tuple[str, ...] = ("cpu",)
    threads: int = Field(1, ge=0)
    """CPU threads per process; 0: torch's default."""
    timeout_s: float = Field(45.0, gt=0)
    """How long a process waits for the others in a step before it takes one for dead and ends the run."""

    @model_validator(mode="after")
    def _pairs(self) -> "Placement":
        if not self.targets or not self.drafters:
            raise ValueError("needs at least one target and one drafter device")
        if len(self.targets) % len(self.drafters):
            raise ValueError(f"{len(self.targets)} targets cannot be shared evenly by {len(self.drafters)} drafters")
        return self


class Training(Section):
    """Online training of the drafter against the hooked target."""

    epochs: Positive = 6
    max_steps: Positive | None = None
    """Ends the run earlier than `epochs` would."""
    batch_rows: Positive = 8
    """Rows of one micro-batch on one drafter."""
    accumulation: Positive = 1
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
    vocabulary_chunk_rows: Positive = 1024
    """Rows of logits held at once by the objective."""
    held_out_share: Share = 0.02
    """Rows kept away from training, chosen by (seed, conversation); evaluation draws its prompts from them."""
    validate_every_steps: Positive = 200
    validation_rows: Positive = 256
    """At most this many held-out rows are validated on."""
    acceptance_every_steps: int = Field(0, ge=0)
    """Decode a few held-out prompts with the drafter as it is, every so many steps; 0: never. The whole target is then
    loaded on the first target device, instead of its layers up to the deepest captured one."""
    acceptance_prompts: Positive = 8
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ("tensorboard",)
    """Where numbers go besides the JSON lines; wandb and mlflow need their packages and their own configuration."""
    checkpoint_every_steps: Positive = 200
    keep_checkpoints: Positive = 2
    """The last ones; the one with the longest held-out accepted prefix is kept besides."""
    publish: Literal["last", "best"] = "last"
    """Which weights become the drafter: those after the last step, or those of the best checkpoint."""
    skips_before_stop: Positive = 10
    """Consecutive steps with a non-finite loss or gradient that end the run."""
    max_bad_row_share: Share = 0.01
    """Rows left out because the target gave non-finite features; more of them end the run."""
    gradient_checkpointing: bool = False
    autocast: bool = True
    """bfloat16 autocast on CUDA; masters and moments are fp32 always."""
    placement: Placement = Placement()


class Evaluation(Section):
    """Draft-and-verify decoding on held-out prompts."""

    prompts: Positive = 64
    max_new_tokens: Positive = 256
    temperature: float = Field(0.0, ge=0)
    min_acceptance_length: float = Field(2.0, ge=1)
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


class Sampling(Section):
    """What is asked of the target. None: not sent, so the server's own default holds."""

    max_tokens: Positive = 4096
    """Tokens of an answer, its thought included."""
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = None
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = Field(None, gt=0)
    seed: bool = True
    """Send a seed of its own with every prompt, drawn from the recipe's."""


class Outcomes(Section):
    """What becomes of answers that are no good. Retry: ask again, and drop what is no better after `retries`."""

    truncated: Literal["keep", "retry", "drop"] = "keep"
    """Ended by the token limit. A retry may take `more_tokens` times as many."""
    empty: Literal["keep", "retry", "drop"] = "retry"
    """No text (a kept one is rejected by raw_completions)."""
    loop: Literal["keep", "retry", "drop"] = "drop"
    """Ends in a repetition loop."""
    duplicate: Literal["keep", "drop"] = "drop"
    """Prompt and answer both occurred before in the file."""
    retries: Positive = 1
    more_tokens: float = Field(2.0, ge=1)
    max_bad_share: Share = 0.5
    """A file with a larger share of bad answers is given up, as soon as that many of `enough_answers` are bad."""
    enough_answers: Positive = 64


class Generation(Section):
    """prompts -> an OpenAI-compatible server -> completions, written to where `source` says. Absent: no generation."""

    prompts: Source
    """Every JSONL file below it becomes the source file of the same partition."""
    servers: Annotated[tuple[str, ...], Field(min_length=1)]
    """Base URLs, as a rule ending in /v1, all serving `model`."""
    model: str
    api_key_variable: str | None = None
    """The environment variable that holds the servers' key, never the key itself."""
    sampling: Sampling = Sampling()
    outcomes: Outcomes = Outcomes()
    answers_in_prompts: Literal["reject", "replace"] = "reject"
    """A prompt that ends with an answer: rejected, or its answer is generated anew (and all others are left)."""
    overwrite: bool = False
    """Whether a source file that was not generated by this platform may be replaced."""
    token_ids: bool = True
    """Ask for the engine's token ids where the server knows how."""
    concurrency: Positive = 64
    """Most requests in flight to one server; adapts downwards to what it bears."""
    attempts: Positive = 6
    """Requests that may fail before a prompt is left without an answer."""
    connect_timeout_s: float = Field(10.0, gt=0)
    request_timeout_s: float = Field(1800.0, gt=0)
    total_timeout_s: float = Field(7200.0, gt=0)
    """For one answer, all its tries and waits together."""
    patience_s: float = Field(300.0, gt=0)
    """Without any answer from any server for this long, everything stops."""
    commit_every_s: float = Field(5.0, gt=0)
    """At most this much work is lost to a kill."""
    price_prompt_tokens: float = Field(0.0, ge=0)
    """Per million, in any currency; with the two others it gives the estimate of the cost."""
    price_completion_tokens: float = Field(0.0, ge=0)
    """Per million."""
    price_hour: float = Field(0.0, ge=0)
    """Of all servers together."""


class Export(Section):
    """The drafter folder that serving engines load."""

    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    local_dir: Path | None = None
    """Also written to this folder; None: S3 only."""
    speculators: bool = True
    """Also in the form of vLLM's speculators library, in the folder speculators/; it holds embedding and lm_head."""


class Recipe(Section):
    """One complete run."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")]
    seed: int = 0
    source: Source
    storage: Storage
    target: Target
    tokenization: Tokenization = Tokenization()
    training_set: TrainingSetFiles = TrainingSetFiles()
    gate: Gate = Gate()
    drafter: Drafter = Drafter()
    training: Training = Training()
    evaluation: Evaluation = Evaluation()
    export: Export = Export()
    automation: Automation = Automation()
    alerts: Alerts = Alerts()
    generation: Generation | None = None

    @model_validator(mode="after")
    def _prompts_apart(self) -> "Recipe":
        if self.generation is not None and self.generation.prompts.bucket == self.source.bucket:
            first, second = sorted((self.generation.prompts.prefix, self.source.prefix))
            if second.startswith(first):
                raise ValueError(f"generation.prompts ({first!r}) and source ({second!r}) must not lie in one another")
        return self

    @property
    def tokenizer_path(self) -> Path:
        """The folder of the tokenizer that renders the completions."""
        return self.tokenization.tokenizer or self.target.path

    @property
    def min_supervised_tokens(self) -> int:
        """Fewest supervised tokens a row may have to be kept."""
        return self.tokenization.min_supervised_tokens or 2 * self.drafter.block_size

    @property
    def gamma(self) -> float:
        """Decay constant of the slot weights (section 3 of the paper: 7, 5, 4 for block sizes 16, 10, 8)."""
        if self.training.gamma is not None:
            return self.training.gamma
        return 7.0 if self.drafter.block_size >= 16 else 5.0 if self.drafter.block_size >= 10 else 4.0


def load_recipe(path: Path) -> Recipe:
    """Read and validate a recipe.

    Raises:
        RecipeError: the file is missing, is no TOML, has an unknown or ill-typed key; the message names file and key.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf8"))
    except FileNotFoundError:
        raise RecipeError(
            f"recipe {path} does not exist; give an existing TOML file, for example recipes/demo.toml"
        ) from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise RecipeError(f"recipe {path} cannot be read: {error}") from None
    try:
        return Recipe.model_validate(table)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(str(p) for p in e['loc']) or 'recipe'}: {_explain(e['type'], e['msg'])}" for e in error.errors()
        )
        raise RecipeError(f"recipe {path}: {problems}") from None


def _explain(kind: str, message: str) -> str:
    return "no such key; check its spelling" if kind == "extra_forbidden" else message
