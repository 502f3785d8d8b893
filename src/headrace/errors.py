"""Every error headrace raises on purpose.

    HeadraceError
    +-- UserError                 the command was asked for something impossible; exit status 2
    |   +-- ConfigError           a key of the recipe: names key, value and what is allowed
    |   +-- DataError             a row or column of a prompt source: names file and row
    |   +-- ModelError            a model directory or checkpoint that cannot be used
    |   +-- RunDirectoryError     an output directory that holds something else
    |   +-- ClusterError          a Ray cluster that does not answer, or cannot hold the run
    +-- RunError                  a run that had begun could not go on; exit status 1
        +-- GeneratorFailure      sampling failed
        +-- LearnerFailure        a process of the learner died or hung
        +-- LearnerHungError      the learner hung in the controller's process, which cannot end it
        +-- VerifierFailure       scoring failed so often that the rewards cannot be trusted
        +-- DivergedError         non-finite gradients several times in a row
        +-- NoSignalError         no group had anything to learn from, step after step
        +-- AlarmError            an alarm sounded in a run that stops for alarms
        +-- CheckpointError       a checkpoint could not be written or read
        +-- WeightSyncError       published and loaded weights differ

Exceptions may cross process boundaries, so every ``__init__`` takes positional arguments only.
"""

from collections.abc import Sequence


class HeadraceError(Exception):
    """Base of the tree above. Its text is meant for the person who runs the command."""


class UserError(HeadraceError):
    """The user can fix this; nothing was started."""


class ConfigError(UserError):
    """One or more keys of a recipe are wrong. ``problems`` holds one line for each."""

    def __init__(self, *problems: str) -> None:
        super().__init__(*problems)
        self.problems: tuple[str, ...] = problems

    def __str__(self) -> str:
        return "\n".join(self.problems)


class DataError(UserError):
    """One or more rows of a prompt source are wrong. ``problems`` holds one line for each."""

    def __init__(self, *problems: str) -> None:
        super().__init__(*problems)
        self.problems: tuple[str, ...] = problems

    def __str__(self) -> str:
        return "\n".join(self.problems)


class ModelError(UserError):
    """A model cannot be found, is of an unknown family, or its files do not fit together."""


class RunDirectoryError(UserError):
    """The output directory belongs to another run, or holds no run at all."""


class ClusterError(UserError):
    """A Ray cluster that does not answer, or that cannot hold the run."""


class RunError(HeadraceError):
    """A run that had begun could not go on."""


class GeneratorFailure(RunError):
    """Sampling failed, or was asked for before the first weights arrived."""


class LearnerFailure(RunError):
    """A process of the learner died or hung; what it was about to learn can be learned again."""


class LearnerHungError(RunError):
    """What the learner began in the controller's own process has not ended by its deadline."""


class VerifierFailure(RunError):
    """Scoring failed so often that the rewards of the run cannot be trusted."""


class DivergedError(RunError):
    """Several non-finite gradients in a row."""


class NoSignalError(RunError):
    """No group had a spread of rewards for many steps in a row."""


class AlarmError(RunError):
    """Rewards look earned in another way than was meant, and the recipe says to stop for that."""


class CheckpointError(RunError):
    """A checkpoint could not be written, or one on disk is damaged or of another run."""


class WeightSyncError(RunError):
    """The weights a generator holds are not those that were published."""


def problems_of(error: UserError) -> Sequence[str]:
    """Return every line of ``error``, one for each thing to fix."""
    if isinstance(error, ConfigError | DataError):
        return error.problems
    return (str(error),)
