"""How long a queue takes to admit: what refusals tell clients about when to come back."""

_TIME_CONSTANT_US = 10_000_000
_LONGEST_GAP_US = 3 * _TIME_CONSTANT_US
"""A longer gap forgets no more than this one: an old rate is better than none."""
_FRACTION_BITS = 20
_MIN_RETRY_US = 100_000
_MAX_RETRY_US = 60_000_000
_RETRY_WITHOUT_DATA_US = 1_000_000


class QueueModel:
    """The rate at which queued prompt tokens are admitted while some wait.

    Time counts from one admission to the next, unless the queue was empty between them. What is
    admitted at the first instant after that counts neither: how long it waited is unknown, and a
    burst into an idle server would look like a rate without bound.
    """

    def __init__(self) -> None:
        self._tokens = 0
        self._waiting_us = 0
        self._start: int | None = None
        self._last = 0

    def admitted(self, tokens: int, now: int) -> None:
        """So many queued prompt tokens left the queue for a worker.

        Args:
            tokens: >= 0.
            now: microseconds, never less than before.
        """
        if self._start is None:
            self._forget(now - self._last)
            self._start = self._last = now
            return
        if now <= self._start:
            return
        elapsed = max(0, now - self._last)
        self._forget(elapsed)
        self._tokens += tokens << _FRACTION_BITS
        self._waiting_us += elapsed << _FRACTION_BITS
        self._last = max(now, self._last)

    def idle(self, now: int) -> None:
        """Nothing waits; until the next admission no time counts.

        Args:
            now: microseconds, never less than before.
        """
        if self._start is not None:
            self._start = None
            self._forget(now - self._last)
            self._last = max(now, self._last)

    def wait_us(self, tokens_ahead: int) -> int | None:
        """How long until so many queued tokens have been admitted, microseconds; None: unknown."""
        if not self._tokens or not self._waiting_us:
            return None
        return -(-max(0, tokens_ahead) * self._waiting_us // self._tokens)

    def retry_after_us(self, excess_tokens: int, waited_us: int) -> int:
        """When to come back, microseconds.

        Args:
            excess_tokens: have to leave the queue first.
            waited_us: how long the next one in the queue has waited, which bounds its speed.
        """
        wait = self.wait_us(excess_tokens)
        if wait is None:
            wait = _RETRY_WITHOUT_DATA_US
        return min(max(wait, waited_us, _MIN_RETRY_US), _MAX_RETRY_US)

    def _forget(self, elapsed_us: int) -> None:
        """Both sums decay alike, by 1 / (1 + t) per step of t time constants.

        For steps that are short against the time constant that is an exponential.
        """
        span = _TIME_CONSTANT_US + min(max(0, elapsed_us), _LONGEST_GAP_US)
        self._tokens = self._tokens * _TIME_CONSTANT_US // span
        self._waiting_us = self._waiting_us * _TIME_CONSTANT_US // span
