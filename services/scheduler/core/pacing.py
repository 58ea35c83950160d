"""When to plan the step after the one that runs: as late as the worker does not notice.

A step that is planned early leaves out whoever arrives before it starts. So the next one is planned
a **lead** before the predicted end of the running one. The lead has to cover planning, the link and
errors of the prediction; it is learned from the worker's idle gaps, with multiplicative increase
where the worker had to wait for a step and slow decrease where it did not. Without a prediction
steps are planned at once.

Also knows the **overhead**: how much longer than a step takes on the worker it is from answer to
answer, which is what streams see.
"""

_TOLERATED_IDLE_US = 200
_TOLERATED_SHARE = 100
"""A gap of 1/100 of the step, and that of an event loop, is no wait."""

_DECREASE = 64
_LEAST_LEAD_US = 500

_OVERHEAD_DECAY = 32


class Pacing:
    """The lead for one worker."""

    def __init__(self) -> None:
        self._lead_us: int | None = None
        self._answered_at = 0
        self.overhead_us = 0
        """The largest of late."""

    def due(self, started: int, predicted_us: int) -> int:
        """When to plan the next step, microseconds.

        Args:
            started: when the running step started, as far as is known.
            predicted_us: how long it takes.
        """
        lead = predicted_us if self._lead_us is None else self._lead_us
        return started + predicted_us - lead

    def answered(self, execute_us: int, idle_us: int, now: int, *, overlapped: bool) -> None:
        """Learns from the answer to a step.

        Args:
            execute_us: how long it took.
            idle_us: how long the worker had waited for it.
            now: microseconds.
            overlapped: it was planned while another one ran; only such steps tell.
        """
        period, self._answered_at = now - self._answered_at, now
        if not overlapped:
            return
        faded = self.overhead_us - self.overhead_us // _OVERHEAD_DECAY
        self.overhead_us = max(faded, min(period - execute_us, execute_us))
        lead = execute_us if self._lead_us is None else self._lead_us
        if idle_us > _TOLERATED_IDLE_US + execute_us // _TOLERATED_SHARE:
            lead = max(lead * 3 // 2, lead + idle_us)
        else:
            lead -= lead // _DECREASE
        self._lead_us = max(_LEAST_LEAD_US, min(lead, execute_us))
