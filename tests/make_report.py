"""An evaluation's report as the core writes it, for what reads reports."""

from typing import Any

from dflash_core.records import AcceptanceCut, DrafterEval, PreviousDrafter
from dflash_core.storage.s3 import Store

NO_PREVIOUS = PreviousDrafter(verdict="skipped", reason="no other drafter of this target has been evaluated")


def make_report(store: Store, **changes: Any) -> DrafterEval:
    """A report as the core writes it, with the given values."""
    numbers: dict[str, Any] = {
        "run": "test-1",
        "target_fingerprint": "f",
        "dtype": "float32",
        "prompts": 2,
        "prompts_sha256": "0" * 64,
        "prompt_files": ("a", "b"),
        "temperature": 0.0,
        "block_size": 4,
        "lossless": True,
        "differing_prompts": 0,
        "acceptance_length": 3.0,
        "acceptance_interval": (2.5, 3.5),
        "acceptance_length_per_prompt": (2.5, 3.5),
        "acceptance_length_response_mean": 3.0,
        "verification_steps_per_prompt": (10, 10),
        "acceptance_length_ngram": 1.5,
        "acceptance_interval_ngram": (1.4, 1.6),
        "acceptance_length_no_features": 1.0,
        "acceptance_interval_no_features": (1.0, 1.0),
        "conditional_acceptance": (0.9, 0.8, 0.7),
        "tokens": 60,
        "verification_steps": 20,
        "histogram": (2, 3, 8, 7),
        "timed_prompts": 2,
        "tokens_per_s": 20.0,
        "tokens_per_s_without": 10.0,
        "speed_up": 2.0,
        "speed_up_interval": (1.8, 2.2),
        "cuts": (
            AcceptanceCut(cut="file", name="a", prompts=1, verification_steps=10, acceptance_length=2.5, interval=None),
        ),
        "skipped_cuts": {"thinking": "no switch"},
        "stops": {" 2": 3},
        "examples": (),
        "previous": NO_PREVIOUS,
        "picture": store.put("drafter_eval/test-1/acceptance.png", b"\x89PNG"),
        "markdown": store.put("drafter_eval/test-1/report.md", b"# x"),
        "settings": "s",
    }
    return DrafterEval(**{**numbers, **changes})
