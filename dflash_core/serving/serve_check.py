"""`dflash serve-check`: does a running server accept what our own decoder accepts of the same drafter?

Held-out prompts are decoded greedily by the server and by us, with the exported weights; acceptance is read from the
server's metrics and counted by us under one convention (see `server`), so that equal means equal and not similar. The
trade-off: one request after the other, because only then are the counters ours alone; and first the server, then we,
because one GPU holds one of the two.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from dflash_core.decoding.acceptance import acceptance_length, add_histograms
from dflash_core.decoding.decode import DecodedAnswer, DecodingOptions, generate
from dflash_core.decoding.drafts import DrafterDraft
from dflash_core.decoding.prompts import held_out_prompts
from dflash_core.drafter.folder import read_config, read_state
from dflash_core.drafter.runs import find_checkpoint
from dflash_core.errors import IncompatibleError, StorageError, UserError
from dflash_core.evaluation.held_out import HeldOut, Subject, load_subject, open_held_out
from dflash_core.export.export import fetch_export, find_export
from dflash_core.records import DrafterExport, OnProgress, ServeCheck
from dflash_core.serving.server import ServedAnswer, Server
from dflash_core.serving.vllm import VllmOptions, vllm_server
from dflash_core.storage.layout import RunKeys
from dflash_core.target.cached import named_stop_tokens
from dflash_core.target.files import check_target
from dflash_core.workspace import Workspace

Tokens = tuple[int, ...] | None
TOLERANCE = 0.05
"""Relative difference of acceptance lengths that still counts as equal: in bf16, ties break otherwise now and then."""
PROBE_TOKENS = 64
"""Of the first prompt, whose text the server is asked to tokenize."""


@dataclass(frozen=True)
class Question:
    """What is asked of whom."""

    url: str | None
    """A running server with the drafter; None: start vLLM with the exported one."""
    plain_url: str | None = None
    """A server of the same target without the drafter, whose tokens are compared, too."""
    model: str | None = None
    """The served name; None: the only one."""
    vllm_python: Path | None = None
    """Python of an environment with vLLM, needed without `url`."""
    prompts: int = 16


def serve_check(workspace: Workspace, run: str | None, question: Question, on_progress: OnProgress) -> ServeCheck:
    """Ask, decode, compare; write drafter_eval/<run>/serve_check.json.

    Args:
        workspace: its recipe names target, held-out share and the evaluation's token limit.
        run: an exported training run; None: the last one.
        question: the server and how much to ask.
        on_progress: called with (steps done, steps in all); a step is a prompt of one side.

    Raises:
        ObjectMissing: no such run, or it has not been exported.
        IncompatibleError: target, tokenizer or block size of the two sides differ; the message holds both values.
        UserError: no server, no metrics of speculative decoding, another model, or someone else used it meanwhile.
    """
    if (question.url is None) == (question.vllm_python is None):
        raise UserError("give the address of a running server (--url) or a python with vLLM (--vllm-python)")
    recipe, store = workspace.recipe, workspace.derived
    checkpoint = find_checkpoint(store, run)
    check_target(checkpoint, recipe)
    with _exported(workspace, find_export(store, checkpoint.run)) as folder:
        config = read_config(folder)
        held_out = open_held_out(workspace, config, checkpoint.training_set)
        drawn = held_out_prompts(held_out.rows, held_out.split.held_out, recipe.seed, question.prompts)
        options = DecodingOptions(recipe.evaluation.max_new_tokens, named_stop_tokens(recipe.target.path))
        task = _Task([prompt.ids for prompt in drawn], options, on_progress, 2 if question.plain_url is None else 3)
        with _server(workspace, question, folder) as server:
            asked = _ask(server, question.model, held_out, task)
        if asked.block_size > config.block_size:
            raise IncompatibleError(
                f"{asked.url} drafts {asked.block_size - 1} tokens, run {checkpoint.run} was trained for "
                f"{config.block_size - 1}; start it with the latter as num_speculative_tokens"
            )
        # Only now: a server that we started wanted the same GPU, nearly all of it.
        subject = load_subject(held_out, config, read_state(folder, config))
    decoded = _decode(subject, asked.block_size, task)
    plain = None if question.plain_url is None else _complete(Server(question.plain_url), None, task, 2)
    check = _compare(checkpoint.run, asked, decoded, plain)
    store.put_record(RunKeys(checkpoint.run).serve_check, check)
    return check


@dataclass(frozen=True)
class _Task:
    """What both sides decode."""

    prompts: Sequence[Sequence[int]]
    options: DecodingOptions
    on_progress: OnProgress
    sides: int
    """How many decode it."""

    def done(self, side: int, number: int) -> None:
        """Prompt `number` of a side, from 1."""
        count = len(self.prompts)
        self.on_progress(side * count + number, self.sides * count)


@dataclass(frozen=True)
class _Asked:
    """What the server gave and counted."""

    url: str
    model: str
    answers: tuple[ServedAnswer, ...]
    histogram: tuple[int, ...]

    @property
    def block_size(self) -> int:
        return len(self.histogram)


def _ask(server: Server, wanted: str | None, held_out: HeldOut, task: _Task) -> _Asked:
    model = server.model(wanted)
    before = server.counters()
    _check_tokenizer(server, model, held_out, task.prompts[0])
    answers = _complete(server, model, task, 0)
    counted = server.counters().since(before)
    given = sum(answer.count for answer in answers)
    if counted.generated != given:
        raise UserError(
            f"{server.url} gave out {counted.generated} tokens while we got {given}: somebody else uses it; "
            "check a server of your own"
        )
    return _Asked(server.url, model, tuple(answers), counted.histogram)


def _complete(server: Server, model: str | None, task: _Task, side: int) -> list[ServedAnswer]:
    """Every prompt, one after the other."""
    name = server.model(model)
    answers = []
    for number, prompt in enumerate(task.prompts, 1):
        stop = sorted(task.options.stop_tokens)
        answers.append(server.complete(name, prompt, task.options.max_new_tokens, stop))
        task.done(side, number)
    return answers


def _decode(subject: Subject, block_size: int, task: _Task) -> list[DecodedAnswer]:
    """The same by our decoder, as many proposals at a time."""
    target = subject.target
    draft = DrafterDraft(subject.drafter, target.embedding, target.lm_head, block_size=block_size)
    decoded = []
    for number, prompt in enumerate(task.prompts, 1):
        decoded.append(generate(target, draft, prompt, task.options))
        task.done(1, number)
    return decoded


def _check_tokenizer(server: Server, model: str, held_out: HeldOut, prompt: Sequence[int]) -> None:
    """Refuse a server that reads the same text as other tokens; one that cannot say passes."""
    reference = held_out.tokenizer.reference
    text = reference.decode(list(prompt[:PROBE_TOKENS]), skip_special_tokens=False)
    ours = tuple(reference.encode(text, add_special_tokens=False).ids)
    theirs = server.tokenize(model, text)
    if theirs is not None and theirs != ours:
        raise IncompatibleError(
            f"{server.url} tokenizes the first prompt as {list(theirs[:8])}..., {held_out.recipe.tokenizer_path} as "
            f"{list(ours[:8])}...; serve the target with the tokenizer of the training"
        )


def _compare(run: str, asked: _Asked, decoded: list[DecodedAnswer], plain: list[ServedAnswer] | None) -> ServeCheck:
    compared, differences = _differences(asked.answers, [g.tokens for g in decoded], "our decoder's")
    if plain is not None:
        more, further = _differences(asked.answers, [p.tokens for p in plain], "those without the drafter")
        compared, differences = compared + more, differences + further
    histogram = add_histograms([answer.histogram for answer in decoded])
    served_length, length = acceptance_length(asked.histogram), acceptance_length(histogram)
    return ServeCheck(
        run=run,
        url=asked.url,
        model=asked.model,
        prompts=len(decoded),
        block_size=asked.block_size,
        compared=compared,
        differences=tuple(differences),
        served_histogram=asked.histogram,
        decoded_histogram=histogram,
        served_acceptance_length=served_length,
        decoded_acceptance_length=length,
        agrees=_agree(served_length, length),
        verdict=_verdict(asked, histogram, compared, len(differences)),
    )


def _differences(served: Sequence[ServedAnswer], others: Sequence[Tokens], whose: str) -> tuple[int, list[str]]:
    """How many outputs could be compared, and a sentence for each that differs."""
    pairs = [(i, a.tokens, b) for i, (a, b) in enumerate(zip(served, others, strict=True))]
    sentences = []
    for number, ours, other in pairs:
        if ours is not None and other is not None and ours != other:
            short = min(len(ours), len(other))
            at = next((i for i in range(short) if ours[i] != other[i]), short)
            sentences.append(
                f"prompt {number}: served tokens differ from {whose} from token {at} on, "
                f"{list(ours[at : at + 1])} against {list(other[at : at + 1])}"
            )
    return sum(a is not None and b is not None for _, a, b in pairs), sentences


def _verdict(asked: _Asked, decoded: Sequence[int], compared: int, different: int) -> str:
    """One sentence."""
    served, ours = acceptance_length(asked.histogram), acceptance_length(decoded)
    numbers = f"served acceptance length {served:.2f}, decoded {ours:.2f}"
    if not _agree(served, ours) and served < ours:
        return f"lower than it should be: {numbers}; `dflash diagnose` names the cause"
    if not _agree(served, ours):
        return f"higher than it can be: {numbers}; the server does not run this drafter on this target"
    equal = "equal in every step" if asked.histogram == tuple(decoded) else f"equal within {TOLERANCE:.0%}"
    if not compared:
        return f"{equal}: {numbers}; the server returns no token ids to compare"
    tokens = f"{different} of {compared} outputs differ" if different else f"all {compared} outputs equal"
    return f"{equal}: {numbers}; {tokens}"


def _agree(served: float, decoded: float) -> bool:
    return abs(served - decoded) <= TOLERANCE * decoded


@contextmanager
def _exported(workspace: Workspace, export: DrafterExport) -> Iterator[Path]:
    """The exported folder as S3 holds it, verified."""
    work_dir = workspace.work_dir
    with ExitStack() as stack:
        try:
            work_dir.mkdir(parents=True, exist_ok=True)
            folder = Path(stack.enter_context(TemporaryDirectory(prefix=".served-", dir=work_dir)))
            fetch_export(workspace.derived, export, folder)
        except OSError as error:
            raise StorageError(
                f"storage.work_dir {work_dir} cannot take the export: {error}; free disk space"
            ) from None
        yield folder


@contextmanager
def _server(workspace: Workspace, question: Question, drafter: Path) -> Iterator[Server]:
    if question.vllm_python is None:
        assert question.url is not None
        yield Server(question.url)
        return
    target = workspace.recipe.target
    log, options = workspace.work_dir / "vllm.log", VllmOptions(dtype=target.dtype)
    with vllm_server(question.vllm_python, target.path, drafter, log, options) as server:
        yield server
