"""The committed target: its template is Qwen3's kind, its size and quality are what is promised, its rows are whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from demo.sample import Row, sample_completions
from demo.train_target import MASK_TOKEN, TARGET_DIR, check, encode_problem, load_target, main
from demo.word_problems import WordProblem, word_problems

MEBIBYTE = 1024 * 1024


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    return load_target(TARGET_DIR)


@pytest.fixture(scope="module")
def tokenizer(loaded: tuple[Any, Any]) -> Any:
    return loaded[1]


@pytest.fixture(scope="module")
def problems() -> list[WordProblem]:
    return list(word_problems(24, 11, "heldout"))


@pytest.fixture(scope="module")
def rows(problems: list[WordProblem]) -> list[Row]:
    return sample_completions(TARGET_DIR, [(p.id, p.question) for p in problems], seed=3, batch_size=16)


def render(tokenizer: Any, messages: list[dict[str, str]], **options: bool) -> str:
    return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))


def test_the_folder_is_small_and_whole() -> None:
    assert sum(f.stat().st_size for f in TARGET_DIR.rglob("*")) <= 4 * MEBIBYTE
    config = json.loads((TARGET_DIR / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert (config["head_dim"], config["dtype"], config["tie_word_embeddings"]) == (64, "bfloat16", True)


def test_special_and_thought_tokens_are_single_rows_of_the_embedding(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    assert len(tokenizer) <= model.config.vocab_size == 1024
    for token in ("<|im_start|>", "<|im_end|>", "<|endoftext|>", MASK_TOKEN, "<think>", "</think>"):
        assert tokenizer(token).input_ids == [tokenizer.convert_tokens_to_ids(token)]
    assert tokenizer.eos_token_id == model.config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    kept = tokenizer.decode(tokenizer("<think>a</think>b<|im_end|>").input_ids, skip_special_tokens=True)
    assert kept == "<think>a</think>b"


def test_text_survives_the_tokenizer(tokenizer: Any, problems: list[WordProblem]) -> None:
    texts = [p.question + "\n" + p.reasoning for p in problems] + ["Zwölf  Äpfel\n\n\tüber 1234 हिन्दी 🙂", " x "]
    assert [tokenizer.decode(tokenizer(text).input_ids) for text in texts] == texts


def test_every_number_of_the_demo_is_one_token(tokenizer: Any) -> None:
    assert all(len(tokenizer(f" {n}").input_ids) == 1 for n in range(100))


def test_a_turn_is_rendered_as_serving_renders_it(tokenizer: Any) -> None:
    user, reply = {"role": "user", "content": "Q"}, {"role": "assistant", "reasoning_content": "R", "content": "A"}
    asked = "<|im_start|>user\nQ<|im_end|>\n"
    answered = "<|im_start|>assistant\n<think>\nR\n</think>\n\nA<|im_end|>\n"
    assert render(tokenizer, [user, reply]) == asked + answered
    assert render(tokenizer, [user, {"role": "assistant", "content": "<think>\nR\n</think>\n\nA"}]) == asked + answered
    assert render(tokenizer, [user], add_generation_prompt=True) == asked + "<|im_start|>assistant\n"
    assert render(tokenizer, [user], add_generation_prompt=True, enable_thinking=False) == (
        asked + "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


def test_earlier_turns_lose_their_thought(tokenizer: Any) -> None:
    user, reply = {"role": "user", "content": "Q"}, {"role": "assistant", "reasoning_content": "R", "content": "A"}
    text = render(tokenizer, [{"role": "system", "content": "S"}, user, reply, user, reply])
    assert text == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n"
        "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n<think>\nR\n</think>\n\nA<|im_end|>\n"
    )


def test_training_rows_equal_the_rendered_conversation(tokenizer: Any, problems: list[WordProblem]) -> None:
    for problem in problems[:8]:
        reply = {"role": "assistant", "reasoning_content": problem.reasoning, "content": problem.answer}
        text = render(tokenizer, [{"role": "user", "content": problem.question}, reply])
        ids, prompt = encode_problem(tokenizer, problem)
        assert ids == tokenizer(text.removesuffix("\n")).input_ids
        assert tokenizer.decode(ids[:prompt]).endswith("<|im_start|>assistant\n")


def test_the_folder_has_the_quality_it_claims(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check", str(TARGET_DIR)]) == 0
    assert "held-out loss" in capsys.readouterr().out


def test_a_wrong_claim_fails_the_check(tmp_path: Path) -> None:
    for file in TARGET_DIR.iterdir():
        (tmp_path / file.name).symlink_to(file)
    quality = json.loads((TARGET_DIR / "quality.json").read_text())
    quality["heldout_loss"] *= 2
    quality["settings"]["heldout_problems"] = 16
    (tmp_path / "quality.json").unlink()
    (tmp_path / "quality.json").write_text(json.dumps(quality))
    assert not check(tmp_path)


def test_sampled_rows_are_whole(rows: list[Row], problems: list[WordProblem]) -> None:
    assert [row["id"] for row in rows] == [p.id for p in problems]
    for row, problem in zip(rows, problems, strict=True):
        user, assistant = row["messages"]
        assert user == {"role": "user", "content": problem.question}
        assert set(assistant) == {"role", "reasoning_content", "content"}
        assert not any(mark in str(assistant) for mark in ("<think>", "</think>", "<|im_end|>"))
        assert row["usage"]["total_tokens"] == row["usage"]["prompt_tokens"] + row["usage"]["completion_tokens"]
    stopped = [row for row in rows if row["finish_reason"] == "stop"]
    assert len(stopped) >= 0.9 * len(rows)
    assert all(row["messages"][1]["reasoning_content"] and row["messages"][1]["content"] for row in stopped)


def test_a_seed_decides_the_samples(rows: list[Row], problems: list[WordProblem]) -> None:
    questions = [(p.id, p.question) for p in problems]
    assert sample_completions(TARGET_DIR, questions, seed=3, batch_size=16) == rows
    assert sample_completions(TARGET_DIR, questions, seed=4, batch_size=16) != rows


def test_a_cut_thought_is_kept_and_marked(problems: list[WordProblem]) -> None:
    progress: list[tuple[int, int]] = []
    questions = [(p.id, p.question) for p in problems[:4]]
    cut = sample_completions(
        TARGET_DIR, questions, max_new_tokens=12, on_progress=lambda done, total: progress.append((done, total))
    )
    assert progress == [(4, 4)]
    for row in cut:
        assert (row["finish_reason"], row["usage"]["completion_tokens"]) == ("length", 12)
        assert row["messages"][1]["reasoning_content"]
        assert row["messages"][1]["content"] == ""


@torch.inference_mode()
def test_batched_greedy_sampling_equals_one_by_one_without_a_cache(
    loaded: tuple[Any, Any], problems: list[WordProblem]
) -> None:
    """Left padding, the cache and dropped rows must not change what the target says."""
    model, tokenizer = loaded
    questions = [(p.id, p.question) for p in problems[:6]]
    rows = sample_completions(TARGET_DIR, questions, temperature=0, max_new_tokens=40)
    for row, problem in zip(rows, problems, strict=False):
        ids = encode_problem(tokenizer, problem)
        sequence = torch.tensor([ids[0][: ids[1]]])
        for _ in range(40):
            sequence = torch.cat([sequence, model(input_ids=sequence).logits[:, -1:].argmax(-1)], dim=1)
        thought = tokenizer.decode(sequence[0, ids[1] :]).removeprefix("<think>\n")
        assert thought.startswith(row["messages"][1]["reasoning_content"])
