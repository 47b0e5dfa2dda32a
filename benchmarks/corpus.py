"""Completions of the size and shape of the production ones, made here: 500 chats a file, some 2,080 tokens a chat.

    python benchmarks/corpus.py OUT_DIR [--files 4] [--rows 500] [--seed 0]

As varied as text that ships with Python can be: its standard library (code), its reference (prose), word problems with
reasoning (maths), and sentences of invented words in nine scripts. Paragraphs are drawn at random, so no two rows are
alike. Between them stand words that occur nowhere else: drawn ones alone are soon in a tokenizer's cache, which ran
a quarter faster on them than on text from everywhere. File n of a seed is the same wherever the same Python makes it,
whatever the number of files.
"""

# ruff: noqa: E402 - the folder holds a tokenize.py, which must not hide the standard library's: it leaves the path
import sys
from os.path import dirname

sys.path[0] = dirname(dirname(__file__)) if __name__ == "__main__" else sys.path[0]

import argparse
import json
import random
import re
import sysconfig
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from pydoc_data.topics import topics

from demo.word_problems import word_problems

ROWS = 500
WEIGHTS = {"maths": 6, "code": 3, "prose": 2, "scripts": 1}
SCRIPTS = {
    "cyrillic": (0x430, 0x44F),
    "greek": (0x3B1, 0x3C9),
    "arabic": (0x627, 0x64A),
    "hebrew": (0x5D0, 0x5EA),
    "devanagari": (0x905, 0x939),
    "thai": (0xE01, 0xE2E),
    "kana": (0x3042, 0x3093),
    "han": (0x4E00, 0x57FF),
    "hangul": (0xAC00, 0xB3FF),
}
WORDS_A_SCRIPT = 3000
SYLLABLES = [a + b for a in "bcdfghjklmnprstvwz" for b in ("a", "e", "i", "o", "u", "an", "er", "ol", "is")]
FRESH_SHARE = 0.15
"""Of the paragraphs, those with a sentence of new words behind them."""
ASIDES = ("Wait, let me check that again.", "So far so good.", "Hmm, is that right?")

Pools = dict[str, list[str]]


def paragraphs() -> Pools:
    """Paragraphs by kind."""
    problems = list(word_problems(6000, 0, "train"))
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    code: list[str] = []
    for path in sorted(stdlib.rglob("*.py")):
        if "site-packages" not in path.parts and path.stat().st_size <= 300_000:
            blocks = re.split(r"\n\s*\n", path.read_text(encoding="utf8", errors="ignore"))
            code += [f"```python\n{block}\n```" for block in blocks if 120 < len(block) < 2500]
    prose = [p for text in topics.values() for p in re.split(r"\n\s*\n", text) if len(p) > 60]
    maths = [text for p in problems for text in (f"{p.question}\n{p.reasoning}", f"{p.reasoning}\n{p.answer}")]
    return {"maths": maths, "code": code, "prose": prose, "scripts": list(_sentences())}


def _sentences() -> Iterator[str]:
    for low, high in SCRIPTS.values():
        rng = random.Random(low)
        letters = [chr(code) for code in range(low, high + 1) if chr(code).isalpha()]
        words = ["".join(rng.choices(letters, k=rng.randint(1, 7))) for _ in range(WORDS_A_SCRIPT)]
        frequency = [1 / (rank + 1) for rank in range(len(words))]
        for _ in range(400):
            yield " ".join(rng.choices(words, frequency, k=rng.randint(12, 40))) + "."


def fresh(rng: random.Random) -> str:
    """A sentence of words and numbers that nobody wrote before."""
    words = ["".join(rng.choices(SYLLABLES, k=rng.randint(2, 5))) for _ in range(rng.randint(6, 18))]
    return f"{' '.join(words).capitalize()}: {rng.randrange(10**6)}."


def passage(rng: random.Random, pools: Pools, chars: float) -> str:
    """Paragraphs of at least this many characters together."""
    kinds, weights = list(pools), [WEIGHTS[kind] for kind in pools]
    out: list[str] = []
    size = 0
    while size < chars:
        text = rng.choice(pools[rng.choices(kinds, weights)[0]])
        out.append(text)
        size += len(text)
        if rng.random() < 0.3:
            out.append(rng.choice(ASIDES))
        if rng.random() < FRESH_SHARE:
            out.append(fresh(rng))
            size += len(out[-1])
    return "\n\n".join(out)


def lines(index: int, rows: int, seed: int, pools: Pools) -> Iterator[str]:
    """The rows of file `index`."""
    rng = random.Random(f"{seed}/{index}")
    for number in range(rows):
        size = rng.lognormvariate(8.599, 0.7)
        answer = {
            "role": "assistant",
            "reasoning_content": passage(rng, pools, 0.6 * size),
            "content": passage(rng, pools, 0.25 * size),
        }
        messages = [{"role": "user", "content": passage(rng, pools, 300)}, answer]
        row = {"id": f"s{seed}-{index:05d}-{number:04d}", "messages": messages, "finish_reason": "stop"}
        yield json.dumps(row, ensure_ascii=False) + "\n"


def write_files(out: Path, rows_of: dict[int, int], seed: int) -> int:
    """Write some of the files, given as index -> rows; returns their bytes."""
    pools, size = paragraphs(), 0
    for index, rows in rows_of.items():
        path = out / f"part-{index:05d}.jsonl"
        path.write_text("".join(lines(index, rows, seed, pools)), encoding="utf8")
        size += path.stat().st_size
    return size


def write_corpus(out: Path, files: int, rows: int = ROWS, seed: int = 0, last: int | None = None) -> int:
    """Write all files, the last one with `last` rows, in two processes; returns their bytes."""
    out.mkdir(parents=True, exist_ok=True)
    rows_of = dict.fromkeys(range(files), rows)
    rows_of[files - 1] = last or rows
    shares = [{index: rows_of[index] for index in range(first, files, 2)} for first in range(min(2, files))]
    with ProcessPoolExecutor(len(shares)) as pool:
        return sum(pool.map(write_files, [out] * len(shares), shares, [seed] * len(shares)))


def main() -> None:
    """Write a corpus."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--files", type=int, default=4)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    size = write_corpus(arguments.out, arguments.files, arguments.rows, arguments.seed)
    print(f"{arguments.files} files, {size:,} bytes in {arguments.out}")


if __name__ == "__main__":
    main()
