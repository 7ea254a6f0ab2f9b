"""Every error that `elastic` raises on purpose, and the exit code it ends with.

    ElasticError                exit  1   a bug, or something nobody planned for
    |-- ConfigError                   2   the job, the fleet or an override is wrong
    |-- DataError                     2   the corpus cannot be read as asked
    |-- RunFolderError                2   the run folder cannot be used as asked
    |-- PlacementError                3   the cluster can never hold what was asked
    |-- UserCodeError                 1   the user's own model or data code raised
    |-- IntegrityError                1   a stored file is not what its hash says
    |-- ResumableError               75   stopped; the same command goes on
        |-- LockHeldError            75   another driver is writing this run
        |-- StorageError             75   storage stayed unreachable
        |-- DeadlineError            75   a named wait ran out
        |-- BudgetError              75   max_hours or max_cost was reached

A message has four parts, in this order: what is wrong, where, what was seen, how to fix it.
"""

from __future__ import annotations

EXIT_DONE = 0
EXIT_BUG = 1
EXIT_CONFIG = 2
EXIT_CANNOT_FIT = 3
EXIT_RESUMABLE = 75
EXIT_SIGINT = 130
EXIT_SIGTERM = 143


class ElasticError(Exception):
    """Base of all errors of `elastic`.

    Example: an island reports a state that no rule knows; the run ends with exit code 1.
    """

    exit_code = EXIT_BUG

    def __init__(self, what: str, *, where: str = "", saw: str = "", fix: str = "") -> None:
        self.what, self.where, self.saw, self.fix = what, where, saw, fix
        super().__init__(what)

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        if self.saw:
            text += f" (saw: {self.saw})"
        if self.fix:
            text += f"\n  fix: {self.fix}"
        return text

    def __reduce__(self):  # keyword-only parts would be lost by the default
        return (_rebuild, (type(self), self.__dict__.copy()))


def _rebuild(kind: type[ElasticError], state: dict) -> ElasticError:
    error = kind.__new__(kind)
    Exception.__init__(error, state.get("what", ""))
    error.__dict__.update(state)
    return error


class ConfigError(ElasticError):
    """The job, the fleet or an override is wrong; carries **all** problems at once.

    Example: `jobs/mine.yaml:7:3: unknown key 'lerning_rate'; did you mean 'lr'?`
    """

    exit_code = EXIT_CONFIG

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class DataError(ElasticError):
    """The corpus cannot be read as asked.

    Example: `text_column: body`, but `train.parquet` has the columns `id` and `text`.
    """

    exit_code = EXIT_CONFIG


class RunFolderError(ElasticError):
    """The run folder cannot be used as asked.

    Example: a relative run folder under `ray job submit`, where it would be lost with the job.
    """

    exit_code = EXIT_CONFIG


class PlacementError(ElasticError):
    """The cluster can never hold what the fleet asks for.

    Example: an island wants 8 workers of 1 CPU in region `eu`, which has 2 CPUs and no autoscaler.
    """

    exit_code = EXIT_CANNOT_FIT


class UserCodeError(ElasticError):
    """The user's own code raised; the traceback is the last thing printed.

    Example: `model.entry: my_models:tiny` raises a TypeError when it is called.
    """

    exit_code = EXIT_BUG


class IntegrityError(ElasticError):
    """A stored file is not what its hash says.

    Example: one byte of `outer/f0-v12.safetensors` differs from what record 12 hashed.
    """

    exit_code = EXIT_BUG


class ResumableError(ElasticError):
    """The run stopped, nothing is lost, and the same command goes on.

    Example: all islands of a region are away for longer than the fleet allows.
    """

    exit_code = EXIT_RESUMABLE


class LockHeldError(ResumableError):
    """Another driver is writing this run folder.

    Example: the same `elastic train` is started twice.
    """


class StorageError(ResumableError):
    """Storage stayed unreachable after all retries.

    Example: the bucket's credentials expired during the night.
    """


class DeadlineError(ResumableError):
    """A named wait ran out of time.

    Example: `start_timeout_s` passed before island `eu` joined.
    """


class BudgetError(ResumableError):
    """`budget.max_hours` or `budget.max_cost` was reached; the run is complete up to there.

    Example: `max_hours: 2` on a run that needs three.
    """
