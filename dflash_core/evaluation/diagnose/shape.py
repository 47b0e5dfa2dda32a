"""Causes that lie in the drafter's config or in how it is fed: each is a list of assumptions, all measured at once."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace

from dflash_core.drafter.config import LayerType, layer_ids
from dflash_core.errors import IncompatibleError
from dflash_core.evaluation.acceptance import Counts, length_of
from dflash_core.evaluation.diagnose.assumption import Assumption
from dflash_core.evaluation.diagnose.bench import Bench, Cause, Finding, compared, nothing_to_try

MOST_MASKS = 64


def layer_offset(bench: Bench) -> Iterable[Assumption]:
    """Features of the layers next to those named (hidden_states[i] taken for the output of layer i), or the default."""
    ids, last = bench.config.target_layer_ids, bench.config.num_target_layers - 1
    candidates = [tuple(i + step for i in ids) for step in (-1, 1)]
    candidates += [reference.target_layer_ids for reference in bench.facts.references]
    with suppress(IncompatibleError):  # a target too shallow for the default rule
        candidates.append(layer_ids(last + 1, len(ids)))
    for candidate in dict.fromkeys(candidates):
        if candidate != ids and len(candidate) == len(ids) and candidate[0] >= 0 and candidate[-1] <= last:
            what = f"features of layers {_listed(candidate)}, not {_listed(ids)}"
            yield Assumption(what, replace(bench.config, target_layer_ids=candidate))


def position_shift(bench: Bench) -> Iterable[Assumption]:
    """Blocks or features one place off; features that came early showed the anchor's own, which serving has not got."""
    for step in (-1, 1):
        yield replace(bench.as_it_is, what=f"positions of blocks {step:+d}", block_shift=step)
        yield replace(bench.as_it_is, what=f"features {abs(step)} token {_side(step)}", feature_shift=step)


def mask_token(bench: Bench) -> Iterable[Assumption]:
    """Other tokens in the slots to be filled."""
    known = [reference.mask_token_id for reference in bench.facts.references]
    candidates = [i for i in dict.fromkeys([*known, *bench.facts.mask_ids]) if 0 <= i < bench.config.vocab_size]
    for candidate in candidates[:MOST_MASKS]:
        if candidate != bench.config.mask_token_id:
            what = f"mask token {candidate}, not {bench.config.mask_token_id}"
            yield Assumption(what, replace(bench.config, mask_token_id=candidate))


def rope(bench: Bench) -> Iterable[Assumption]:
    """Other bases of the rotation."""
    known = [reference.rope_theta for reference in bench.facts.references]
    for theta in dict.fromkeys([*known, *bench.facts.thetas]):
        if theta != bench.config.rope_theta:
            what = f"rope_theta {theta:g}, not {bench.config.rope_theta:g}"
            yield Assumption(what, replace(bench.config, rope_theta=theta))


def sliding_window(bench: Bench) -> Iterable[Assumption]:
    """Other patterns of full and sliding layers, other windows."""
    config, layers = bench.config, bench.config.num_hidden_layers
    full: tuple[LayerType, ...] = ("full_attention",)
    sliding: tuple[LayerType, ...] = ("sliding_attention",)
    patterns: list[tuple[tuple[LayerType, ...], int | None]] = [(full * layers, None)]
    for window in (config.sliding_window or bench.facts.window, bench.facts.window):
        patterns += [(sliding * (layers - 1) + full, window), (sliding * layers, window)]
    patterns += [(reference.layer_types, reference.sliding_window) for reference in bench.facts.references]
    for types, width in dict.fromkeys(patterns):
        same = types == config.layer_types and (width == config.sliding_window or sliding[0] not in types)
        if not same and len(types) == layers:
            shown = ", ".join("S" if kind == "sliding_attention" else "F" for kind in types)
            what = f"layers {shown}" + (f" with window {width}" if "S" in shown else "")
            yield Assumption(what, replace(config, layer_types=types, sliding_window=width))


def embedding(bench: Bench) -> Iterable[Assumption]:
    """Embedding and lm_head of the target exchanged, tied though they are not, or not tied though they are."""
    target = bench.target
    if target.embedding.data_ptr() != target.lm_head.data_ptr():
        yield replace(bench.as_it_is, what="the embedding as lm_head (tied)", lm_head=target.embedding)
        yield replace(bench.as_it_is, what="the lm_head as embedding (tied)", embedding=target.lm_head)
    for name, head in bench.facts.lm_heads:
        yield replace(bench.as_it_is, what=name, lm_head=head)


CAUSES: dict[Cause, Callable[[Bench], Iterable[Assumption]]] = {
    "layer offset": layer_offset,
    "position shift": position_shift,
    "mask token": mask_token,
    "rope": rope,
    "sliding window": sliding_window,
    "embedding": embedding,
}


def try_shapes(bench: Bench) -> tuple[Counts, list[Finding]]:
    """The accepted prefixes as it is, and a finding for each cause."""
    tried = {cause: list(alternatives(bench)) for cause, alternatives in CAUSES.items()}
    flat = [assumption for assumptions in tried.values() for assumption in assumptions]
    before, *after = bench.prefixes(bench.texts, [bench.as_it_is, *flat])
    measured = iter(after)
    findings = []
    for cause, assumptions in tried.items():
        pairs = [(assumption, next(measured)) for assumption in assumptions]
        findings.append(_finding(cause, before, pairs))
    return before, findings


def _finding(cause: Cause, before: Counts, pairs: list[tuple[Assumption, Counts]]) -> Finding:
    if not pairs:
        return nothing_to_try(cause, before)
    best, counts = max(pairs, key=lambda pair: length_of(pair[1]))
    return compared(cause, best.what, before, counts, alternatives=len(pairs))


def _listed(ids: tuple[int, ...]) -> str:
    return ", ".join(map(str, ids))


def _side(step: int) -> str:
    return "late" if step > 0 else "early"
