"""Errors meant for people: one sentence that says what, where and what to do."""


class UserError(Exception):
    """Anything a user can repair: the CLI prints the sentence and exits with `exit_code`; Dagster shows it."""

    exit_code = 2


class RecipeError(UserError):
    """The recipe is malformed, names something that does not exist, or contradicts itself."""


class StorageError(UserError):
    """The object store refused, is unreachable, or lacks a bucket."""


class ObjectMissing(StorageError):
    """No object under that key."""


class ObjectChanged(StorageError):
    """The object was replaced between listing and reading (its ETag differs)."""


class ObjectCorrupt(StorageError):
    """The bytes do not have the recorded sha256 or length."""


class UnreadableFile(UserError):
    """A source file that cannot be processed as a whole; its partition fails, the others go on."""


class IncompatibleError(UserError):
    """Two artefacts that do not belong together (drafter and target, say); the message holds both values."""


class GateError(UserError):
    """The training set's gate did not pass and nobody asked to go on anyway."""


class ProcessDied(UserError):
    """A process of ours was killed, crashed or hung; the message says which, and how it ended."""

    exit_code = 1


class TrainingStopped(UserError):
    """Training ended before its last step; a checkpoint was saved and the same command continues from it."""

    exit_code = 75
