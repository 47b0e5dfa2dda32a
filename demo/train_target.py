"""Train the demo's target: our own tokenizer and a 1.3M-parameter Qwen3-class model which solves word problems aloud.

The trade-off: the smallest model that copies names and numbers of the question reliably, since that is what a drafter
can learn to foresee; arithmetic is a by-product. `--out DIR` trains, `--check DIR` measures a folder.
The script reproduces the quality (held-out loss within 2 %), not the bytes.

Shapes: B sequences, S tokens, V vocabulary.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from demo.word_problems import WordProblem, word_problems

TARGET_DIR = Path(__file__).parent / "target"
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>")
THOUGHT_TOKENS = ("<think>", "</think>")
MASK_TOKEN = "<|mask|>"
HELDOUT_SEED = 7_001
TOLERANCE = 0.02

# Qwen3's conventions in our own words: ChatML turns; a thought is shown only in turns after the last user message.
CHAT_TEMPLATE = """\
{%- set ns = namespace(last_user=-1) -%}
{%- for message in messages -%}
  {%- if message.role == 'user' -%}{%- set ns.last_user = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
  {%- set text = message.content or '' -%}
  {%- set thought = message.reasoning_content or '' -%}
  {%- if message.role == 'assistant' -%}
    {%- if '</think>' in text -%}
      {%- set thought = thought or text.split('</think>')[0].split('<think>')[-1] -%}
      {%- set text = text.split('</think>')[-1] -%}
    {%- endif -%}
    {%- set text = text.lstrip('\\n') -%}
    {%- if loop.index0 > ns.last_user and (loop.last or thought) -%}
      {%- set text = '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + text -%}
    {%- endif -%}
  {%- endif -%}
  {{- '<|im_start|>' + message.role + '\\n' + text + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\\n' -}}
  {%- if enable_thinking is defined and not enable_thinking -%}
    {{- '<think>\\n\\n</think>\\n\\n' -}}
  {%- endif -%}
{%- endif -%}
"""


@dataclass(frozen=True)
class Settings:
    """Everything that decides the trained target; lengths in tokens, `problems` and `batch_size` in sequences."""

    vocab_size: int = 1024  # rows of the embedding; the text may need fewer
    hidden_size: int = 128
    intermediate_size: int = 384
    layers: int = 6
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 64
    problems: int = 24_000
    batch_size: int = 16
    learning_rate: float = 3e-3
    warmup: float = 0.05
    weight_decay: float = 0.05
    prompt_weight: float = 0.1
    direct_share: float = 0.06
    heldout_problems: int = 256
    seed: int = 1


@dataclass(frozen=True)
class Quality:
    """Teacher-forced on held-out completions: nats a token, share of tokens whose argmax is right, nats of entropy."""

    heldout_loss: float
    token_accuracy: float
    entropy: float
    tokens: int


def train_tokenizer(problems: Sequence[WordProblem], vocab_size: int) -> Any:
    """Train a byte-level BPE on the problems' text; the special and thought tokens follow its merges.

    Numbers are cut in pieces of at most two digits, and the text is salted with all of them: each is one token.
    """
    added = len(SPECIAL_TOKENS) + len(THOUGHT_TOKENS)
    tokenizer = Tokenizer(models.BPE())
    words = Regex(r" ?\p{L}+| ?\p{N}{1,2}| ?[^\s\p{L}\p{N}]+|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(words, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - added, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    texts = ("\n".join((p.question, p.reasoning, p.answer, "user\nassistant\nsystem\n")) for p in problems)
    numbers = " ".join(["", *(str(n) for n in range(100))])
    tokenizer.train_from_iterator([*texts, *[numbers] * (len(problems) // 10)], trainer)
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.add_tokens(list(THOUGHT_TOKENS))
    fast: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # transformers leaves it untyped
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        mask_token=MASK_TOKEN,
        additional_special_tokens=["<|im_start|>"],
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def encode_problem(tokenizer: Any, problem: WordProblem, think: bool = True) -> tuple[list[int], int]:
    """Token ids of prompt and completion as serving would see them (up to `<|im_end|>`), and the prompt's length."""
    user = [{"role": "user", "content": problem.question}]
    prompt = tokenizer.apply_chat_template(user, tokenize=False, add_generation_prompt=True, enable_thinking=think)
    thought = f"<think>\n{problem.reasoning}\n</think>\n\n" if think else ""
    prompt_ids = tokenizer(prompt, add_special_tokens=False).input_ids
    reply_ids = tokenizer(f"{thought}{problem.answer}<|im_end|>", add_special_tokens=False).input_ids
    return prompt_ids + reply_ids, len(prompt_ids)


def batches(
    rows: Sequence[tuple[list[int], int]], batch_size: int, pad: int, prompt_weight: float
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (ids [B,S], weights [B,S]) of rows that lie next to each other; weights: 0 padding, `prompt_weight`, 1."""
    for start in range(0, len(rows), batch_size):
        chunk = rows[start : start + batch_size]
        longest = max(len(ids) for ids, _ in chunk)
        ids_BS = torch.full((len(chunk), longest), pad)
        weights_BS = torch.zeros(len(chunk), longest)
        for i, (ids, prompt) in enumerate(chunk):
            ids_BS[i, : len(ids)] = torch.tensor(ids)
            weights_BS[i, :prompt] = prompt_weight
            weights_BS[i, prompt : len(ids)] = 1.0
        yield ids_BS, weights_BS


def shuffled_by_length(rows: list[tuple[list[int], int]], batch_size: int) -> list[tuple[list[int], int]]:
    """Order rows so that those of a batch are about equally long (little padding), the batches in random order."""
    rows = sorted(rows, key=lambda row: len(row[0]))
    starts = torch.randperm(len(rows) // batch_size) * batch_size
    return [row for start in starts.tolist() for row in rows[start : start + batch_size]]


def learning_rate_factor(progress: float, warmup: float) -> float:
    """Linear warm-up, then a cosine to zero; `progress` runs from 0 to 1."""
    if progress < warmup:
        return progress / warmup
    return 0.5 * (1 + math.cos(math.pi * (progress - warmup) / (1 - warmup)))


def new_model(settings: Settings, tokenizer: Any) -> Qwen3ForCausalLM:
    """A freshly initialised Qwen3-class model in float32, its embedding tied to its head."""
    config = Qwen3Config(
        vocab_size=settings.vocab_size,
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.kv_heads,
        head_dim=settings.head_dim,
        initializer_range=0.05,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config)


def train(settings: Settings, out: Path) -> None:
    """Train tokenizer and model and write them to `out`, with `quality.json` beside them."""
    torch.set_num_threads(1)
    torch.manual_seed(settings.seed)
    started = time.process_time()
    problems = list(word_problems(settings.problems, settings.seed, "train"))
    tokenizer = train_tokenizer(problems[:4000], settings.vocab_size)
    model = new_model(settings, tokenizer)
    direct = torch.rand(len(problems)) < settings.direct_share
    rows = [encode_problem(tokenizer, p, think=not d) for p, d in zip(problems, direct.tolist(), strict=True)]
    rows = shuffled_by_length(rows, settings.batch_size)
    steps = len(rows) // settings.batch_size
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=settings.learning_rate,
        betas=(0.9, 0.98),
    )
    model.train()
    with Progress(
        TextColumn("step {task.completed}/{task.total}"),
        BarColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeRemainingColumn(),
    ) as progress:
        task = progress.add_task("train", total=steps, loss=float("nan"))
        data = batches(rows, settings.batch_size, tokenizer.pad_token_id, settings.prompt_weight)
        for step, (ids_BS, weights_BS) in enumerate(data):
            for group in optimizer.param_groups:
                group["lr"] = settings.learning_rate * learning_rate_factor((step + 1) / steps, settings.warmup)
            logits_BSV = model(input_ids=ids_BS[:, :-1], use_cache=False).logits
            losses = F.cross_entropy(logits_BSV.flatten(0, 1), ids_BS[:, 1:].flatten(), reduction="none")
            weights = weights_BS[:, 1:].flatten()
            loss = (losses * weights).sum() / weights.sum()
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            progress.update(task, advance=1, loss=loss.item())
    seconds = time.process_time() - started  # of one core, however busy the machine is
    save(model, tokenizer, out)
    quality = measure(out, settings.heldout_problems)
    report = asdict(quality) | {"train_core_seconds": round(seconds), "settings": asdict(settings)}
    (out / "quality.json").write_text(json.dumps(report, indent=2) + "\n")
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{out}: {parameters:,} parameters, held-out loss {quality.heldout_loss:.4f}, {seconds:.0f} s of one core")


def save(model: Any, tokenizer: Any, out: Path) -> None:
    """Write a transformers folder: bfloat16 safetensors, configs, tokenizer, chat template."""
    out.mkdir(parents=True, exist_ok=True)
    model.generation_config.update(
        eos_token_id=[tokenizer.eos_token_id, tokenizer.pad_token_id],
        pad_token_id=tokenizer.pad_token_id,
        do_sample=True,
        temperature=0.7,
        max_new_tokens=256,
    )
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)


def load_target(folder: Path) -> tuple[Any, Any]:
    """Load a target folder from disk alone, weights in float32, in eval mode; returns (model, tokenizer)."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    return model.eval(), AutoTokenizer.from_pretrained(folder, local_files_only=True)


@torch.inference_mode()
def measure(folder: Path, heldout_problems: int) -> Quality:
    """Teacher-forced quality of a folder on held-out completions (thinking on; prompt tokens do not count)."""
    torch.set_num_threads(1)
    model, tokenizer = load_target(folder)
    rows = [encode_problem(tokenizer, p) for p in word_problems(heldout_problems, HELDOUT_SEED, "heldout")]
    rows.sort(key=lambda row: len(row[0]))
    loss = hits = entropy = count = 0.0
    for ids_BS, weights_BS in batches(rows, 32, tokenizer.pad_token_id, prompt_weight=0.0):
        logits_BSV = model(input_ids=ids_BS[:, :-1], use_cache=False).logits
        keep = weights_BS[:, 1:] > 0
        log_probs_TV = logits_BSV[keep].log_softmax(-1)
        labels_T = ids_BS[:, 1:][keep]
        loss += F.nll_loss(log_probs_TV, labels_T, reduction="sum").item()
        hits += (log_probs_TV.argmax(-1) == labels_T).sum().item()
        entropy -= (log_probs_TV.exp() * log_probs_TV).sum().item()
        count += labels_T.numel()
    return Quality(loss / count, hits / count, entropy / count, int(count))


def check(folder: Path) -> bool:
    """Print a folder's held-out loss against its `quality.json`; True when they agree within 2 %."""
    recorded = json.loads((folder / "quality.json").read_text())
    quality = measure(folder, recorded["settings"]["heldout_problems"])
    off = abs(quality.heldout_loss / float(recorded["heldout_loss"]) - 1)
    print(f"held-out loss {quality.heldout_loss:.4f}, recorded {recorded['heldout_loss']:.4f}: {off:.2%} off")
    return off <= TOLERANCE


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m demo.train_target", description="Train or check the demo's target."
    )
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--out", type=Path, help="train and write the folder")
    action.add_argument("--check", type=Path, help="measure a folder against its quality.json; 1 if 2 %% off")
    parser.add_argument(
        "--problems", type=int, default=Settings.problems, help="training problems (default %(default)s)"
    )
    options = parser.parse_args(arguments)
    if options.check:
        return 0 if check(options.check) else 1
    train(Settings(problems=options.problems), options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
