"""How busy one scheduler is, as far as is known: its last report, and what we did since."""

from collections.abc import Container

from services.tokenizer.domain import LoadReport

REQUEST_TOKENS = 128
"""What a request counts for beside its waiting prompt: tokens of its answer still to be made."""


class SchedulerLoad:
    """Counts requests of ours against the last report, which tells of everybody's."""

    def __init__(self) -> None:
        self._requests = 0
        self._tokens = 0
        self._own_requests = 0
        self._own_tokens = 0
        self._reports = 0
        self.prefixes: Container[bytes] | None = None
        """Hashes of the blocks it has cached; None while it has not told."""

    @property
    def outstanding_tokens(self) -> int:
        """Work that waits or runs there, in tokens."""
        requests = max(0, self._requests + self._own_requests)
        return self._tokens + self._own_tokens + REQUEST_TOKENS * requests

    def report(self, report: LoadReport) -> None:
        """Takes what the scheduler says; ours is in it."""
        self._requests = report.running + report.waiting
        self._tokens = report.waiting_tokens
        self._own_requests = self._own_tokens = 0
        self._reports += 1
        if report.prefixes is not None:
            self.prefixes = report.prefixes

    def opened(self, tokens: int) -> int:
        """A request of ours goes there; returns what `ended` wants to be told.

        Args:
            tokens: of its prompt.
        """
        self._own_requests += 1
        self._own_tokens += tokens
        return self._reports

    def ended(self, opened: int, tokens: int) -> None:
        """A request of ours has ended, or went elsewhere."""
        self._own_requests -= 1
        if opened == self._reports:
            self._own_tokens -= tokens

    def forget(self) -> None:
        """The session is gone; what the scheduler said is no longer known."""
        self._requests = self._tokens = 0
        self._own_requests = self._own_tokens = 0
        self._reports += 1
        self.prefixes = None
