"""The demo's completions: eight files that the demo target answered itself, a small bad one, one with a broken line."""

import hashlib
import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

from demo.word_problems import word_problems
from dflash_core.local_files import sha256_file

FILES = 8
ROWS = 281
BAD_FILE = "part-03"
BAD_ROWS = 33
"""So few that a target served on one core answers them again in well under a minute."""
BAD_SHARE = 0.87
BROKEN_LINE_FILE = "part-05"
SEED = 7
TEMPERATURE = 0.7
MAX_NEW_TOKENS = 256


def completion_files(target: Path, folder: Path, on_progress: Callable[[int, int], None]) -> dict[str, Path]:
    """Sample every file's completions from the target, once for this target and these problems; name -> path.

    They are in a folder of `folder` that is named after both. One line of `part-05` is cut in the middle, as a killed
    writer leaves it.
    """
    folder = folder / _origin(target)
    names = [f"part-{index:02d}" for index in range(FILES)]
    paths = {name: folder / f"{name}.jsonl" for name in names}
    if all(path.exists() for path in paths.values()):
        on_progress(FILES, FILES)
        return paths
    from demo.sample import sample_completions  # torch is paid for only when something has to be sampled

    folder.mkdir(parents=True, exist_ok=True)
    questions = _questions()
    asked = [question for name in names for question in questions[name]]
    rows = iter(sample_completions(target, asked, TEMPERATURE, MAX_NEW_TOKENS, SEED, on_progress=on_progress))
    for name in names:
        lines = [json.dumps(row, ensure_ascii=False) for row in islice(rows, len(questions[name]))]
        if name == BROKEN_LINE_FILE:
            lines[ROWS // 2] = lines[ROWS // 2][: len(lines[ROWS // 2]) // 2]
        aside = paths[name].with_suffix(".part")
        aside.write_text("\n".join(lines) + "\n", encoding="utf8")
        aside.rename(paths[name])
    return paths


def prompts_of_bad_file() -> bytes:
    """What the bad file was asked, as a file of prompts."""
    rows = [{"id": row_id, "prompt": question} for row_id, question in _questions()[BAD_FILE]]
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def _questions() -> dict[str, list[tuple[str, str]]]:
    """File -> its questions as (id, text)."""
    names = [f"part-{index:02d}" for index in range(FILES)]
    counts = {name: BAD_ROWS if name == BAD_FILE else ROWS for name in names}
    problems = iter(word_problems(sum(counts.values()), SEED, "train"))
    return {
        name: [(problem.id, problem.question) for problem in islice(problems, count)] for name, count in counts.items()
    }


def _origin(target: Path) -> str:
    """A hash of all that the completions come from: the target's files and the code that asks it."""
    code = [Path(__file__).with_name(name) for name in ("files.py", "sample.py", "word_problems.py")]
    made_from = [*sorted(target.iterdir()), *code]
    return hashlib.sha256(b"".join(sha256_file(path).encode() for path in made_from)).hexdigest()[:12]


def spoil(good: bytes) -> bytes:
    """The same file as a server with the wrong template would have written it: 87 % empty thoughts and "OK."."""
    rows: list[dict[str, Any]] = [json.loads(line) for line in good.splitlines()]
    bad = round(len(rows) * BAD_SHARE)
    for row in rows[:bad]:
        row["messages"][-1] = {"role": "assistant", "reasoning_content": "", "content": "OK."}
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
