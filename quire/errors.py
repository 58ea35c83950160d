"""What can go wrong, as one tree.

    QuireError
    ├── InvalidRequest       fields are wrong; names them
    ├── UnknownSetting       no keyword of that name
    ├── NotSupported         a later version has it, this one does not
    ├── ModelNotFound        no such model on this machine
    ├── PullFailed           a model could not be fetched or converted
    ├── SetFailed            the local set could not start, or lost a process
    └── ServerError          a server said no, or could not be asked
        ├── NotFound             no such model or method there
        ├── AlreadyExists        the request id is live
        ├── PreconditionFailed   something else must change first
        ├── NotAllowed           no or wrong credentials
        ├── Overloaded           a bound is reached; says when to try again
        ├── TooLarge             one message is over the size limit
        ├── Unavailable          nothing can serve it now
        │   └── Unreachable          there is no connection to the server
        │       └── AnswerCut            it was lost in mid-answer, and does not come back
        ├── DeadlineExceeded     the time given was not enough
        ├── Cancelled            the server ended the call
        ├── Replaced             a newer attempt took its place
        └── ServerFault          a fault on the other side

Every message is one line. How a gRPC status becomes one of these: `quire.statuses`.
"""


class QuireError(Exception):
    """Whatever Quire raises on purpose.

    Args:
        message: what is wrong and, where one can do something about it, what; one line.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class InvalidRequest(QuireError, ValueError):
    """A field of the request is wrong, or several; the message names all of them.

    Args:
        field: its name, or its path in the message, e.g. `sampling.top_p`. May be empty where a
            server named none.
        description: what is wrong, with the limit and the value.
        others: more wrong fields, each with its description.
    """

    def __init__(self, field: str, description: str, *others: tuple[str, str]) -> None:
        violations = ((field, description), *others)
        super().__init__("; ".join(f"{at}: {text}" if at else text for at, text in violations))
        self.field = field
        self.description = description
        self.violations = violations


class UnknownSetting(QuireError, TypeError):
    """There is no keyword of that name."""


class NotSupported(QuireError):
    """A later version has it, this one does not."""


class ModelNotFound(QuireError):
    """No such model on this machine."""


class PullFailed(QuireError):
    """A model could not be fetched or converted."""


class SetFailed(QuireError):
    """The local set could not start, or lost a process."""


class ServerError(QuireError):
    """A server said no, or could not be asked.

    Args:
        message: one line.
        reason: the server's stable upper-case identifier of the case, or "".
        retry_after_s: when the same call may succeed, seconds; None where it will not by itself.
    """

    def __init__(
        self, message: str, *, reason: str = "", retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after_s = retry_after_s


class NotFound(ServerError):
    """No such model or method there."""


class AlreadyExists(ServerError):
    """The request id is live."""


class PreconditionFailed(ServerError):
    """Something else must change first."""


class NotAllowed(ServerError):
    """No or wrong credentials."""


class Overloaded(ServerError):
    """A bound is reached; `retry_after_s` says when to try again."""

    @property
    def was_shed(self) -> bool:
        """Whether it was turned away since its own target for the first token cannot be met."""
        return self.reason in ("SHED", "TTFT_TARGET")


class TooLarge(ServerError):
    """One message is over the size limit of a hop."""


class Unavailable(ServerError):
    """Nothing can serve it now."""


class Unreachable(Unavailable):
    """There is no connection to the server."""


class AnswerCut(Unreachable):
    """The connection was lost in the middle of an answer, and could not be made again."""


class DeadlineExceeded(ServerError):
    """The time given was not enough."""


class Cancelled(ServerError):
    """The server ended the call."""


class Replaced(ServerError):
    """A newer attempt took its place."""


class ServerFault(ServerError):
    """A fault on the other side."""
