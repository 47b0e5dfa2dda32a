"""A server that decodes as we do and counts as vLLM does, and one that answers with any function."""

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from dflash_core.decoding.decode import DecodingOptions, generate
from dflash_core.decoding.drafts import DrafterDraft
from dflash_core.drafter.model import Drafter
from dflash_core.recipe import Recipe
from dflash_core.target.cached import load_cached_target
from dflash_core.tokenization.tokenizer import load_tokenizer

Listen = Callable[..., str]


@dataclass
class Fake:
    """A server that decodes as we do and counts as vLLM does; its fields make it another one."""

    recipe: Recipe
    drafter: Drafter
    block_size: int = 4
    metrics: bool = True
    token_ids: bool = True
    names: tuple[str, ...] = ("tiny",)
    accepts: int | None = None
    """Counts this many proposals of each step as accepted, whatever is true."""
    third_token: int | None = None
    """Says this instead of the third token."""
    foreign_tokens: int = 0
    """Given to somebody else at each request."""
    tokenizer: Callable[[list[int]], list[int]] | None = None
    counted: list[int] = field(default_factory=list)
    generated: int = 0

    def __post_init__(self) -> None:
        self.target = load_cached_target(
            self.recipe.target.path, self.drafter.config.target_layer_ids, torch.float32, torch.device("cpu")
        )
        self.draft = DrafterDraft(
            self.drafter.eval(), self.target.embedding, self.target.lm_head, block_size=self.block_size
        )

    def answer(self, path: str, body: dict[str, object]) -> tuple[int, str]:
        if path == "/v1/models":
            return 200, json.dumps({"data": [{"id": name} for name in self.names]})
        if path == "/metrics":
            return 200, self.counters() if self.metrics else "up 1.0\n"
        if path == "/tokenize" and self.tokenizer is not None:
            tokenizer = load_tokenizer(self.recipe.tokenizer_path, self.recipe.tokenization)
            ids = tokenizer.reference.encode(str(body["prompt"]), add_special_tokens=False).ids
            return 200, json.dumps({"tokens": self.tokenizer(ids)})
        if path == "/v1/completions":
            return 200, json.dumps(self.complete(body))
        return 404, "no such path"

    def complete(self, body: dict[str, object]) -> dict[str, object]:
        assert body["temperature"] == 0
        options = DecodingOptions(int(str(body["max_tokens"])), frozenset(body["stop_token_ids"]))  # type: ignore[call-overload]
        made = generate(self.target, self.draft, body["prompt"], options)  # type: ignore[arg-type]
        for accepted, steps in enumerate(made.histogram):
            self.counted += [accepted if self.accepts is None else self.accepts] * steps
        tokens = list(made.tokens)
        if self.third_token is not None:
            tokens[2] = self.third_token
        self.generated += len(tokens) + self.foreign_tokens
        choice = {"text": "", "token_ids": tokens} if self.token_ids else {"text": ""}
        return {"choices": [choice], "usage": {"completion_tokens": len(tokens)}}

    def counters(self) -> str:
        lines = ["# HELP vllm:x y", f'vllm:spec_decode_num_drafts_total{{engine="0"}} {float(len(self.counted))}']
        lines.append(f'vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {float(sum(self.counted))}')
        lines.append(f'vllm:generation_tokens_total{{engine="0",model_name="tiny"}} {float(self.generated)}')
        for k in range(self.block_size - 1):
            count = float(sum(accepted > k for accepted in self.counted))
            name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
            lines.append(f'{name}{{engine="0",model_name="tiny",position="{k}"}} {count}')
        return "\n".join(lines) + "\n"


@pytest.fixture
def listen() -> Iterator[Callable[[Callable[[str, dict[str, object]], tuple[int, str]]], str]]:
    """Starts an HTTP server that answers with a function of (path, body); gives its address."""
    running: list[ThreadingHTTPServer] = []

    def start(answer: Callable[[str, dict[str, object]], tuple[int, str]]) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.reply({})

            def do_POST(self) -> None:
                self.reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def reply(self, body: dict[str, object]) -> None:
                status, text = answer(self.path, body)
                self.send_response(status)
                if status == 302:
                    self.send_header("Location", text)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_: object) -> None:
                """Quiet."""

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        running.append(server)
        return f"http://127.0.0.1:{server.server_address[1]}"

    yield start
    for server in running:
        server.shutdown()
        server.server_close()
