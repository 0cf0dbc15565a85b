"""The one family of errors: what a user reads, the code a program reads, and the way out.

Every error that can reach a user is an `ExpertdError`. Its message names what and where in one line, its hint says
what to do next. `server.errors` maps the codes to HTTP statuses and the CLI maps `exit_code`; nothing else prints
exceptions.
"""

from __future__ import annotations

from typing import ClassVar

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_NOT_READY = 0, 1, 2, 3


class ExpertdError(Exception):
    """Base: a one-line message, a stable `code`, a `hint` (may be empty) and the exit code of a verb that meets it."""

    code: ClassVar[str] = "internal"
    exit_code: ClassVar[int] = EXIT_FAILED

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def line(self) -> str:
        """The message and the hint as one line."""
        return f"{self.message}; {self.hint}" if self.hint else self.message


class UsageError(ExpertdError):
    """The command line or an argument of a verb is off."""

    code = "usage"
    exit_code = EXIT_USAGE


class ConfigError(ExpertdError):
    """A configuration file, environment variable or flag has an unknown key or a value out of its limits."""

    code = "config"
    exit_code = EXIT_USAGE


class NotReadyError(ExpertdError):
    """The daemon is not there yet: loading, warming or not running."""

    code = "not_ready"
    exit_code = EXIT_NOT_READY


class ModelError(ExpertdError):
    """A model file cannot be used."""

    code = "model"


class ModelNotFoundError(ModelError):
    code = "model_not_found"


class ModelFormatError(ModelError):
    """Not a GGUF, damaged, cut short, or of a version that cannot be read."""

    code = "model_format"


class ModelUnsupportedError(ModelError):
    """A sound file that this build cannot run (old per-expert layout, unknown architecture)."""

    code = "model_unsupported"


class ModelChangedError(ModelError):
    """The file was replaced, truncated or became unreadable under the daemon."""

    code = "model_changed"


class ModelReadError(ModelChangedError):
    """The disk gives an error where the model is read."""

    code = "model_unreadable"


class EngineError(ExpertdError):
    """llama.cpp could not load, allocate or decode."""

    code = "engine"


class EngineHungError(EngineError):
    """A decode or a load stands still: nothing has moved for longer than it may."""

    code = "engine_hung"


class ContextFullError(ExpertdError):
    """A prompt does not fit in the context: `n_prompt` and `n_ctx` are tokens."""

    code = "context_length_exceeded"

    def __init__(self, n_prompt: int, n_ctx: int) -> None:
        super().__init__(
            f"the prompt has {n_prompt} tokens, the context holds {n_ctx}",
            hint="shorten the prompt or start with a larger n_ctx",
        )
        self.n_prompt, self.n_ctx = n_prompt, n_ctx


class RequestError(ExpertdError):
    """A request names something that cannot be done: a bad parameter, a grammar that does not parse, a template
    that raises. `param` is the field's name, or empty."""

    code = "invalid_request"
    exit_code = EXIT_USAGE

    def __init__(self, message: str, *, hint: str = "", param: str = "") -> None:
        super().__init__(message, hint=hint)
        self.param = param


class QueueFullError(ExpertdError):
    """As many requests wait as may."""

    code = "queue_full"

    def __init__(self, message: str, *, hint: str = "", retry_after_seconds: float = 1.0) -> None:
        super().__init__(message, hint=hint)
        self.retry_after_seconds = retry_after_seconds


class BudgetError(ExpertdError):
    """A byte budget is below what one token needs, or above what there is."""

    code = "budget"
    exit_code = EXIT_USAGE


class PagesError(ExpertdError):
    """The kernel refused a call that cannot be done without."""

    code = "pages"


class StateError(ExpertdError):
    """A profile, trace or state directory is torn, foreign, in use, full or read-only."""

    code = "state"


class ProfileNotFoundError(StateError):
    """No profile of that name is kept for this model."""

    code = "profile_not_found"


class BenchError(ExpertdError):
    """A benchmark cannot run here: no cgroup, too little disk, an arm that died."""

    code = "bench"
