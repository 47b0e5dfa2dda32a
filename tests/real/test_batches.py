"""Batches of rows as long as real ones."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from dflash_core.batches.order import epoch_order


def test_padded_waste_of_production_like_files_is_below_ten_percent(material: Path, tmp_path: Path) -> None:
    tool = material / "tools" / "make_bench.py"
    command = [sys.executable, str(tool), str(tmp_path), "--files", "1", "--rows", "500"]
    subprocess.run(command, check=True, capture_output=True)
    (file,) = tmp_path.glob("*.jsonl")
    texts = [
        "\n".join(str(value) for message in json.loads(line)["messages"] for value in message.values())
        for line in file.read_text(encoding="utf8").splitlines()
    ]
    tokenizer = Tokenizer.from_file(str(material / "tokenizers" / "qwen3.6" / "tokenizer.json"))
    lengths = np.array([len(encoded.ids) for encoded in tokenizer.encode_batch(texts)], np.int32)
    waste = {}
    for batch_rows, step_rows in ((8, 8), (8, 32), (4, 64)):
        padded = 0
        for step in epoch_order([str(i) for i in range(len(lengths))], lengths, 0, 0, step_rows):
            for start in range(0, len(step), batch_rows):
                part = lengths[step[start : start + batch_rows]]
                padded += len(part) * int(part.max())
        waste[batch_rows, step_rows] = 1 - int(lengths.sum()) / padded
    assert max(waste.values()) < 0.10, waste
