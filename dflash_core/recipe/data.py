"""The data half of the recipe: where completions are, how they are made, tokenized, selected and judged."""

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from dflash_core.recipe.base import Decides, DecidesNothing, Positive, Section, Share, TemplateOption, Use


class SourceSettings(Section):
    """Where the completions are: every object below `prefix` ending in .jsonl, .jsonl.gz or .jsonl.zst."""

    decides: ClassVar[tuple[Use, ...]] = ()
    bucket: str
    prefix: str = ""


class StorageSettings(Section):
    """Where everything derived goes, and how the object store is reached (credentials: the standard AWS variables)."""

    decides: ClassVar[tuple[Use, ...]] = ()
    bucket: str
    prefix: str = ""
    endpoint_url: str | None = None
    region: str | None = None
    embedded_store: Path | None = None
    """Use the embedded object store with its data in this folder, started where it does not run yet."""
    work_dir: Path = Path(".dflash/work")
    """Local scratch: memory-mapped shards and training checkpoints on their way to S3."""
    downloads: Positive = 32
    """Downloads in flight over all worker processes together; a process holds at most 24 MiB of files, however."""
    uploads: Positive = 32
    """Uploads in flight over all worker processes together."""
    attempts: Positive = 5
    connect_timeout_s: float = Field(10.0, gt=0)
    read_timeout_s: float = Field(60.0, gt=0)
    request_checksums: bool = True
    """Off for object stores that refuse the x-amz-checksum headers of recent SDKs."""

    @model_validator(mode="after")
    def _one_store(self) -> "StorageSettings":
        if self.embedded_store is not None and self.endpoint_url is not None:
            raise ValueError("give embedded_store or endpoint_url, not both")
        return self


class TargetSettings(Section):
    """The frozen target model: a local Hugging Face folder (config.json, tokenizer, safetensors)."""

    decides: ClassVar[tuple[Use, ...]] = ("weights",)
    path: Annotated[Path, DecidesNothing]
    """Its content decides, see `target_fingerprint`."""
    layer_ids: tuple[int, ...] | None = None
    """Decoder layers whose outputs the drafter sees; None: `layers` of them, spread as in section 2 of the paper."""
    layers: Positive = 5
    dtype: Annotated[Literal["float32", "bfloat16"], Decides("weights", "acceptance")] = "bfloat16"


class TokenizationSettings(Section):
    """Completions -> token ids and loss masks."""

    decides: ClassVar[tuple[Use, ...]] = ("rows",)
    tokenizer: Annotated[Path | None, DecidesNothing] = None
    """A tokenizer folder (config.json next to it); None: the target's. Its content decides."""
    chat_template: Annotated[Path | None, DecidesNothing] = None
    """A Jinja file that replaces the tokenizer's own chat template; give the one that serving uses. Its content
    decides."""
    template_options: Annotated[dict[str, TemplateOption], Decides("rows", "acceptance", "answers")] = Field(
        default_factory=dict
    )
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
    backend: Annotated[Literal["auto", "fastokens", "huggingface"], DecidesNothing] = "auto"
    """All give equal ids, or are not used."""
    audit_share: Annotated[Share, DecidesNothing] = 0.0005
    """Of the rows that the fast backend encoded: the reference encodes them again, and has to agree."""
    workers: Annotated[int, DecidesNothing] = Field(0, ge=0)
    """Worker processes; 0: one per core. At most as many as downloads or uploads may be in flight."""


class GateSettings(Section):
    """Thresholds of the gate between data and training. Shares are of rendered rows unless said otherwise."""

    decides: ClassVar[tuple[Use, ...]] = ()
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


class TrainingSetSettings(Section):
    """What goes into the training set."""

    decides: ClassVar[tuple[Use, ...]] = ()
    files: tuple[str, ...] = ()
    """Keys, patterns ("part-0*") and ranges ("part-007..part-031"); none: every source file."""


class SamplingSettings(Section):
    """What is asked of the target. None: not sent, so the server's own default holds."""

    decides: ClassVar[tuple[Use, ...]] = ("answers",)
    max_tokens: Positive = 4096
    """Tokens of an answer, its thought included."""
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = None
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = Field(None, gt=0)
    seed: Annotated[bool, DecidesNothing] = True
    """Send a seed of its own with every prompt, drawn from the recipe's, which then decides."""


class OutcomeSettings(Section):
    """What becomes of answers that are not good. Retry: ask again, and drop what is not better after `retries`."""

    decides: ClassVar[tuple[Use, ...]] = ("kept answers",)
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


class GenerationSettings(Section):
    """prompts -> an OpenAI-compatible server -> completions, written to where `source` says. Absent: no generation."""

    decides: ClassVar[tuple[Use, ...]] = ()
    prompts: SourceSettings
    """Every JSONL file below it becomes the source file of the same partition."""
    servers: Annotated[tuple[str, ...], Field(min_length=1)]
    """Base URLs, as a rule ending in /v1, all serving `model`."""
    model: Annotated[str, Decides("answers")]
    api_key_variable: str | None = None
    """The environment variable that holds the servers' key, never the key itself."""
    sampling: SamplingSettings = SamplingSettings()
    outcomes: OutcomeSettings = OutcomeSettings()
    answers_in_prompts: Annotated[Literal["reject", "replace"], Decides("kept answers")] = "reject"
    """A prompt that ends with an answer: rejected, or its answer is generated again (and all others are left)."""
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
