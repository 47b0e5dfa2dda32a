"""What vLLM is told of a drafter."""

import json
from pathlib import Path

import pytest

from dflash_core.errors import UserError
from dflash_core.serving.vllm import speculative_config, vllm_server


def test_vllm_is_told_one_proposal_less_than_the_block(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"block_size": 16}')
    for asked, told in ((None, 15), (7, 7)):
        assert speculative_config(tmp_path, asked) == {
            "method": "dflash",
            "model": str(tmp_path),
            "num_speculative_tokens": told,
        }


@pytest.mark.parametrize("form", ["published", "speculators"])
@pytest.mark.parametrize(("kinds", "told"), [("FF", ""), ("SS", ""), ("SF", "1")])
def test_vllm_is_told_of_drafters_that_mix_sliding_and_full_layers(
    tmp_path: Path, form: str, kinds: str, told: str
) -> None:
    layers = {"layer_types": [{"F": "full_attention", "S": "sliding_attention"}[kind] for kind in kinds]}
    table = layers if form == "published" else {"transformer_layer_config": layers}
    (tmp_path / "config.json").write_text(json.dumps(table | {"block_size": 4}))
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "runner=$VLLM_USE_V2_MODEL_RUNNER."\nexit 1\n')
    python.chmod(0o755)
    started = vllm_server(python, tmp_path, tmp_path, tmp_path / "log")
    with pytest.raises(UserError, match=rf"does not serve .*runner={told}\."), started:
        pass
