"""What goes wrong with an engine, as classes. Errors in a call's own arguments are TypeError and ValueError as ever."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .request import Completion


class EngineClosed(RuntimeError):
    """The engine is closed: it takes no request and no weights any more."""


class EngineForked(RuntimeError):
    """The engine belongs to the process that made it: its thread does not run in a forked one."""


class StepFailed(RuntimeError):
    """The computation of a step failed (out of memory, a kernel, a device). Nobody can say whose request did it, so all
    that were in the engine end with this; `__cause__` is the failure itself. The engine can be used again."""


class StageDied(StepFailed):
    """A stage of the pipeline, or a rank, has died, in its process or with it. Requests under way end with this; before
    the next one all are made anew."""


class WeightsTorn(RuntimeError):
    """The weights are partly old and partly new. Nothing is computed with them until all are updated again."""


class EngineAsleep(RuntimeError):
    """What was asked for needs memory that the engine has given back in sleep(): wake_up() comes first."""


class WeightsMissing(WeightsTorn):
    """The engine has dropped its weights in sleep(level=2): nothing is computed until all are updated."""


class HandoverFailed(RuntimeError):
    """Weights did not change hands, unless a PeerLost says that they may have. The message says why, and what the
    engine has now."""


class PeerLost(HandoverFailed):
    """The process at the other end has died, or says nothing any more.

    in_doubt   the engine may have taken all of the weights, or take them yet: only the last answer is missing. A sender
               alone can be in doubt. The engine's weight_version tells, and sending them again is harmless: see
               WeightSender.send
    """

    def __init__(self, message: str, in_doubt: bool = False) -> None:
        super().__init__(message)
        self.in_doubt = in_doubt


class ReplicaDied(RuntimeError):
    """A replica's process has ended, and no other could do what was asked of it."""


class UpdateIncomplete(RuntimeError):
    """New weights are in use on some replicas and not on others, which get no requests until the next update.

    failed   replica -> what went wrong there
    """

    def __init__(self, message: str, failed: "dict[int, BaseException] | None" = None) -> None:
        super().__init__(message)
        self.failed = failed or {}


class ModelInUse(ValueError):
    """Another engine runs this very model and owns its weights."""


class RequestError(ValueError):
    """`generate(..., raise_on_error=True)`: requests that were themselves at fault.

    completions   of all requests of the call, in order: those of the others are whole
    """

    def __init__(self, completions: "list[Completion]") -> None:
        failed = [c for c in completions if c.finish_reason == "error"]
        first = failed[0]
        name = "" if first.request_id is None else f" ({first.request_id!r})"
        super().__init__(
            f"generate: {len(failed)} of {len(completions)} completions failed; the first{name}: {first.error}"
        )
        self.completions = completions
