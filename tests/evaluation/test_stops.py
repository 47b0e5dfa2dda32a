"""Where drafting stops is told as the steps had it: what was accepted, what fell, what the target said."""

from tokenizers import Tokenizer, decoders, models

from dflash_core.evaluation.decode import Generation, Step
from dflash_core.evaluation.markdown import _code
from dflash_core.evaluation.prompts import Prompt
from dflash_core.evaluation.stops import frequent_stops, stop_examples, stops_of

# First token 1; then [2, 3 | 9 fell, 4]; then [5, 6, 7 all stood, 8]; then [| 9 fell, 4]; the last step is cut off.
GENERATION = Generation(
    tokens=(1, 2, 3, 4, 5, 6, 7, 8, 4),
    block_size=4,
    steps=(Step(2, 9), Step(3, None), Step(0, 9), Step(2, 9)),
    seconds=1.0,
)


def tokenizer() -> Tokenizer:
    made = Tokenizer(models.WordLevel({f"w{i}": i for i in range(12)}, unk_token="w0"))
    made.decoder = decoders.Fuse()
    return made


def test_stops_are_read_from_the_steps() -> None:
    assert [tuple(stop) for stop in stops_of(GENERATION)] == [(0, 2, 9, 4), (7, 0, 9, 4)]
    assert frequent_stops(tokenizer(), [GENERATION, GENERATION]) == {"w4": 4}


def test_an_example_is_the_step_that_accepted_least() -> None:
    prompt = Prompt((10, 11), "part-00", 0, "row")
    (example,) = stop_examples(tokenizer(), [prompt], [GENERATION])
    assert (example.file, example.row_id) == ("part-00", "row")
    assert (example.accepted, example.refused, example.said) == ("", "w9", "w4")
    assert example.before == "w10w11" + "".join(f"w{t}" for t in GENERATION.tokens[:8])
    perfect = Generation((1, 2, 3), 3, (Step(2, None),), 1.0)
    assert stop_examples(tokenizer(), [prompt], [perfect]) == ()


def test_model_text_cannot_break_the_table() -> None:
    assert _code("a\n`b``c` | d\x07") == "``` a↵`b``c` | d␇ ```"
    assert _code("") == ""
