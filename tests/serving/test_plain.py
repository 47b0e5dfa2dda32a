"""vLLM without a drafter says what our own decoder says, token by token: the ground that the other tests stand on."""

import random

import pytest
import torch

from dflash_core.decoding.decode import DecodingOptions, generate_plain
from dflash_core.errors import UserError
from dflash_core.serving.server import Server
from dflash_core.target.cached import load_cached_target
from tests.serving.conftest import DEMO_TARGET

pytestmark = [pytest.mark.serving, pytest.mark.timeout(900)]


def test_greedy_tokens_are_the_same(demo_target_server: Server) -> None:
    torch.set_num_threads(1)
    target = load_cached_target(DEMO_TARGET, (1,), torch.float32, torch.device("cpu"))
    choice = random.Random(0)
    model = demo_target_server.model(None)
    for _ in range(5):
        prompt = [choice.randrange(900) for _ in range(choice.randrange(3, 40))]
        ours = generate_plain(target, prompt, DecodingOptions(48, target.stop_tokens)).tokens
        theirs = demo_target_server.complete(model, prompt, 48, sorted(target.stop_tokens))
        assert theirs.tokens == ours
        assert theirs.count == len(ours)


def test_a_server_without_a_drafter_has_no_counters(demo_target_server: Server) -> None:
    with pytest.raises(UserError, match=r"/metrics counts no speculative decoding"):
        demo_target_server.counters()


def test_another_model_and_a_bad_request_are_one_sentence_each(demo_target_server: Server) -> None:
    with pytest.raises(UserError, match=r"serves target, not gpt; name one of them with --model"):
        demo_target_server.model("gpt")
    with pytest.raises(UserError, match=r"/v1/completions answers 4\d\d: .*1024"):
        demo_target_server.complete("target", [5] * 2000, 8, [])
