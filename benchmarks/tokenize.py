"""Tokenization side by side with what else there is: the same files, one run, tokens per second of CPU.

    python benchmarks/tokenize.py --files DIR --tokenizer DIR --json OUT

CPU is that of all threads and children (RUSAGE_SELF + RUSAGE_CHILDREN), one core's worth each; loading a tokenizer is
left out everywhere and told apart. Rivals get a chat template with generation tags, which is the only kind that
`return_assistant_tokens_mask` works with. Needs `pip install datasets` beside the development requirements. A missed
bar is named, with exit code 1. Few files are read in a fraction of a second: take twenty for a steady number.
"""

# ruff: noqa: E402 - named like a module of the standard library, this file has to hide its folder first
import sys
from os.path import dirname

sys.path[0] = dirname(dirname(__file__))

import argparse
import gc
import json
import os
import platform
import resource
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_core.recipe import Recipe, SourceSettings, StorageSettings, TargetSettings, TokenizationSettings
from dflash_core.records import SourceFile
from dflash_core.shards.overlap import FileFailed, InFlight
from dflash_core.shards.pipeline import verify_files
from dflash_core.shards.tokenize_file import FileTokenizer
from dflash_core.shards.workers import tokenize_here
from dflash_core.storage.embedded import embedded_store, ensure_bucket
from dflash_core.storage.partitions import list_sources
from dflash_core.workspace import Workspace, connect

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TAGGED = """\
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' %}{% generation %}{{ '<think>\\n' + m.reasoning_content | trim + '\\n</think>\\n\\n'
 + m.content | trim + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}
{%- else %}{{ m.content | trim + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
RIVAL_FILES = 3
"""Files that the slow ones get; their rate does not depend on it."""
SMALL_OBJECTS = 1805
LATENCY_S = 0.2
LEAST = {"ratio_datasets_map": 40.0, "ratio_plain_loop": 25.0, "s3_mtok_per_cpu_s": 10.0, "two_processes_speedup": 1.8}
MOST_LATENCY_S = 20.0
"""For reading all the small objects."""
BUCKET = "benchmark"


def cpu() -> float:
    """Seconds of CPU that this process and its ended children have used."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def rate(work: Callable[[], int]) -> float:
    """Million tokens per CPU-second, once: a second pass over the same texts would find its words in a cache."""
    gc.collect()
    began = cpu()
    tokens = work()
    return tokens / (cpu() - began) / 1e6


def recipe(tokenizer: Path, **more: object) -> Recipe:
    """Nothing cut, nothing dropped: all read every token."""
    rules = {"max_length": 1 << 20, "min_supervised_tokens": 1, "workers": 1}
    return Recipe(
        name="benchmark",
        source=SourceSettings(bucket=BUCKET, prefix="completions/"),
        storage=StorageSettings.model_validate({"bucket": BUCKET, "prefix": "derived/", **more}),
        target=TargetSettings(path=tokenizer),
        tokenization=TokenizationSettings.model_validate(rules),
    )


def tokenize_files(tokenizer: FileTokenizer, files: Sequence[Path], out: Path) -> int:
    """Ours, from local files to local shards."""
    tokens = 0
    for file in files:
        body = file.read_bytes()
        source = SourceFile(partition=file.stem, key=file.name, uri=str(file), etag="", size=len(body))
        done = tokenizer.tokenize(body, source, "")
        (out / f"{file.stem}.arrow").write_bytes(done.shard)
        tokens += done.statistics.tokens
    return tokens


def datasets_map(tokenizer: "PreTrainedTokenizerBase", files: Sequence[Path], out: Path) -> int:
    """datasets.map with the assistant mask of transformers."""
    import datasets

    datasets.disable_progress_bars()
    loaded = datasets.load_dataset("json", data_files=[str(file) for file in files], cache_dir=str(out), split="train")

    def encode(row: dict) -> dict:
        done = tokenizer.apply_chat_template(
            row["messages"], chat_template=TAGGED, return_assistant_tokens_mask=True, return_dict=True
        )
        return {"input_ids": done["input_ids"], "loss_mask": done["assistant_masks"]}

    mapped = loaded.map(encode, remove_columns=loaded.column_names)
    return sum(len(ids) for ids in mapped["input_ids"])


def plain_loop(tokenizer: "PreTrainedTokenizerBase", files: Sequence[Path], out: Path) -> int:
    """Two apply_chat_template calls a row, the mask from their difference."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    tokens = 0
    for file in files:
        rows = []
        with file.open(encoding="utf8") as lines:
            for line in lines:
                messages = json.loads(line)["messages"]
                prompt = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, return_dict=False)
                ids = tokenizer.apply_chat_template(messages, return_dict=False)
                rows.append((ids, np.arange(len(ids)) >= len(prompt)))
                tokens += len(ids)
        table = pa.table({"input_ids": [ids for ids, _ in rows], "loss_mask": [mask for _, mask in rows]})
        pq.write_table(table, out / f"{file.stem}.parquet")
    return tokens


Rival = Callable[["PreTrainedTokenizerBase", Sequence[Path], Path], int]


def rival(work: Rival, path: Path, files: Sequence[Path], out: Path) -> float:
    """Million tokens per CPU-second, imports and loading left out."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    answer = {"role": "assistant", "reasoning_content": "t", "content": "a"}
    first = out / "first.jsonl"
    first.write_text(json.dumps({"messages": [{"role": "user", "content": "q"}, answer]}) + "\n", encoding="utf8")
    work(tokenizer, [first], out)
    return rate(lambda: work(tokenizer, files, out))


def scaling(tokenizer: FileTokenizer, files: Sequence[Path], out: Path) -> float:
    """Wall time of one process over that of two, each with half of the files.

    Some 36 files a process: its first touches of memory cost 0.1 s, which a real one spreads over hundreds of files.
    """

    def wall(shares: Sequence[Sequence[Path]]) -> float:
        began, children = time.monotonic(), []
        for share in shares:
            if (child := os.fork()) == 0:
                status = 1
                try:
                    tokenize_files(tokenizer, share, out)
                    status = 0
                finally:
                    os._exit(status)
            children.append(child)
        if any(os.waitpid(child, 0)[1] for child in children):
            sys.exit("a child of the scaling measurement failed; see its output above")
        return time.monotonic() - began

    work = [*files] * max(1, 36 // len(files)) * 2
    return min(wall([work]) for _ in range(2)) / min(wall([work[::2], work[1::2]]) for _ in range(2))


def through_the_store(tokenizer: FileTokenizer, workspace: Workspace, files: Sequence[Path]) -> float:
    """GET, tokenize, PUT; the client's CPU."""
    for i, file in enumerate(files):
        workspace.source.put(f"{i:03d}-{file.stem}.jsonl", file.read_bytes())
    sources, storage = list_sources(workspace.source), workspace.recipe.storage
    limits = InFlight(storage.downloads, storage.uploads)

    def work() -> int:
        outcomes = list(tokenize_here(workspace, tokenizer, sources, limits))
        failed = [outcome for outcome in outcomes if isinstance(outcome, FileFailed)]
        if failed:
            sys.exit(failed[0].reason)
        return sum(outcome.manifest.tokens for outcome in outcomes if not isinstance(outcome, FileFailed))

    return rate(work)


class SlowProxy:
    """Forwards to the store, each request `LATENCY_S` late."""

    def __init__(self, endpoint: str) -> None:
        host, port = endpoint.removeprefix("http://").split(":")
        self._target = host, int(port)
        self._server = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.endpoint = f"http://127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            client, _ = self._server.accept()
            store = socket.create_connection(self._target)
            threading.Thread(target=self._pump, args=(client, store, LATENCY_S), daemon=True).start()
            threading.Thread(target=self._pump, args=(store, client, 0.0), daemon=True).start()

    @staticmethod
    def _pump(source: socket.socket, sink: socket.socket, delay: float) -> None:
        try:
            while data := source.recv(1 << 16):
                time.sleep(delay)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            return


def latency(tokenizer: Path, workspace: Workspace) -> float:
    """Wall seconds for reading many small objects from a store that is far away."""
    for i in range(SMALL_OBJECTS):
        workspace.source.put(f"small/{i:05d}.jsonl", b'{"prompt": "q", "completion": "a"}\n')
    sources = [source for source in list_sources(workspace.source) if "small" in source.key]
    slow = SlowProxy(str(workspace.access.endpoint_url)).endpoint
    far = connect(recipe(tokenizer, endpoint_url=slow), workspace.access)
    began = time.monotonic()
    if any(isinstance(outcome, FileFailed) for outcome in verify_files(far, sources)):
        sys.exit("reading through the slow proxy failed")
    return time.monotonic() - began


def measure(files: Sequence[Path], path: Path, out: Path) -> dict[str, Any]:
    """All numbers."""
    began = cpu()
    tokenizer = FileTokenizer(recipe(path))
    startup = cpu() - began
    gc.freeze()
    tokenize_files(tokenizer, files[:1], out)
    ours = rate(lambda: tokenize_files(tokenizer, files[1:], out))
    two_processes = scaling(tokenizer, files, out)
    with embedded_store(out / "store") as access:
        ensure_bucket(BUCKET, access)
        workspace = connect(recipe(path), access)
        s3 = through_the_store(FileTokenizer(workspace.recipe), workspace, files)
        small = latency(path, workspace)
    loop = rival(plain_loop, path, files[1 : 1 + RIVAL_FILES], out)
    mapped = rival(datasets_map, path, files[1 : 1 + RIVAL_FILES], out)
    return {
        "ours_mtok_per_cpu_s": ours,
        "plain_loop_mtok_per_cpu_s": loop,
        "datasets_map_mtok_per_cpu_s": mapped,
        "ratio_plain_loop": ours / loop,
        "ratio_datasets_map": ours / mapped,
        "s3_mtok_per_cpu_s": s3,
        "two_processes_speedup": two_processes,
        "latency_1805_gets_s": small,
        "startup_cpu_s": startup,
        "backend": tokenizer.encoder.backend.name if tokenizer.encoder else "reference",
        "files": len(files),
        "bytes": sum(file.stat().st_size for file in files),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "date": datetime.now(UTC).date().isoformat(),
    }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=Path, required=True, help="a folder of JSONL files")
    parser.add_argument("--tokenizer", type=Path, required=True, help="a tokenizer folder")
    parser.add_argument("--json", type=Path, required=True, help="where the numbers go")
    arguments = parser.parse_args()
    files = sorted(arguments.files.glob("*.jsonl"))
    if len(files) < 2:
        sys.exit(
            f"{arguments.files} holds {len(files)} *.jsonl files; give a folder of two or more (the first warms up)"
        )
    with tempfile.TemporaryDirectory() as scratch:
        numbers = measure(files, arguments.tokenizer, Path(scratch))
    for name, value in numbers.items():
        print(f"{name:28} {value:.3f}" if isinstance(value, float) else f"{name:28} {value}")
    arguments.json.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf8")
    low = [
        f"{name} is {numbers[name]:.3f}, at least {bar:g} wanted" for name, bar in LEAST.items() if numbers[name] < bar
    ]
    slow = numbers["latency_1805_gets_s"] > MOST_LATENCY_S
    missed = low + [f"1,805 GETs take more than {MOST_LATENCY_S:g} s"] * slow
    sys.exit(f"missed: {'; '.join(missed)}" if missed else 0)


if __name__ == "__main__":
    main()
