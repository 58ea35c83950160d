"""How long a step takes, learned from the worker's own timings: milliseconds become a chunk size.

Least squares over what a step costs by (1, tokens, rows, context), the sums forgetting by halves.
Two things differ from the textbook. The ridge draws each coefficient towards its last value rather
than to zero, so that what recent steps say nothing about (tokens of prompts, while all rows decode)
stays as it was learned. And the solution is kept non-negative by dropping features, as in active
set methods for non-negative least squares (Lawson and Hanson, "Solving Least Squares Problems",
1974, chapter 23).

Sums are exact integers; everything else is plain Python floats in a fixed order, so that the same
observations give the same coefficients on every machine.
"""

import math
from collections import deque
from dataclasses import dataclass

_MEMORY = 64
"""Sums are halved when they hold so many steps."""
_FRACTION_BITS = 10
"""Of the sums, so that halving loses nothing that counts."""
_PREFILL_MEMORY = 256
"""Sums over steps with prefills are halved too when so many others have passed."""
_SOLVE_EVERY = 32
_SOLVE_EVERY_AT_FIRST = 4
_MIN_OBSERVATIONS = 8
_MIN_TOKEN_RATIO = 2
"""Most to fewest tokens of a step, before predictions are made;"""
_ENOUGH_OBSERVATIONS = 32
"""or so many steps, as where each step is filled with prefills: trying another size tells more."""
_RIDGE = (0.01, 0.01, 0.02, 0.08)
"""Pull towards the last solution, relative to each feature's own sum of squares; where nothing
tells them apart, base and tokens explain more than rows, and these more than context."""
_OUTLIER = 4
"""A step counts at most so many times its prediction in the sums, so that a hiccup hardly does."""
_SURPRISE = 1.25
"""A step slower than so many times its prediction has the model solved at once."""
_BRISK = 0.8
_DRIFT = 8
"""After so many steps slower than `_SURPRISE`, or faster than `_BRISK`, times their prediction, few
others between, the machine has changed: half of what was learned before is forgotten, and again
after half as many. From half as many on, slow steps are no hiccups any more."""

_MARGIN_WINDOW = 64
_MARGIN_RANK = 4
"""The margin is this largest error of the window: p95."""
_EXCESS_WINDOW = 128
"""What chunks are cut by is the largest relative error of this window,"""
_EXCESS_CORE_RANK = 13
"""but at most twice this one (p90) and 1/32, so that a few hiccups do not shut prompts out."""
_EXCESS_UNIT = 1024
_EXCESS_LIMIT = 1024
_EXCESS_AT_FIRST = 256
"""Least relative error assumed while the window holds fewer than `_EXCESS_KNOWN`."""
_EXCESS_KNOWN = 16
_EXCESS_LEAST = 16
"""Least relative error ever assumed."""
_EXCESS_FADE = 512
"""The relative errors are halved after so many steps without prefills; one with prefills undoes
`_EXCESS_HOLD` of them."""
_EXCESS_HOLD = 8
_PROBE_EVERY = 64
"""After so many steps without prefills a chunk is tried even if it is predicted to be too slow: a
wrong prediction would otherwise never be corrected."""
_FIRST_CHUNK = 16
"""Prefill tokens tried where none have been seen."""

_Vector = tuple[float, float, float, float]


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a step's duration depends on.

    Args:
        tokens: computed in the step.
        rows: requests in it.
        context: KV tokens read: the sum over rows of the tokens computed once the step is done.
    """

    tokens: int
    rows: int
    context: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeCoefficients:
    """Microseconds a step takes: base and per token, row and context token; all >= 0."""

    base_us: float
    per_token_us: float
    per_row_us: float
    per_context_us: float


class StepTimeModel:
    """The step times of one worker.

    `observe` each step's result; the first is ignored, since it includes what a worker does once
    (allocation, compilation).
    """

    def __init__(self) -> None:
        self._decodes = _Sums()
        self._prefills = _Sums()
        self._pending: list[tuple[int, int, int, int, float]] = []
        self._beta: _Vector | None = None
        self._seen = -1
        self._min_tokens = 1 << 62
        self._max_tokens = 0
        self._largest_prefill = 0
        self._fitted_prefill = 0
        self._errors: deque[int] = deque(maxlen=_MARGIN_WINDOW)
        self._excess: deque[int] = deque(maxlen=_EXCESS_WINDOW)
        self._decodes_alone = 0
        self._drift = 0
        self._since_halved = 0
        self._fading = 0
        self._margin: int | None = 0
        self._limit: int | None = None

    @property
    def coefficients(self) -> StepTimeCoefficients | None:
        """What the model has learned; None before it has data."""
        if self._beta is None:
            return None
        base, token, row, context = self._beta
        return StepTimeCoefficients(
            base_us=base, per_token_us=token, per_row_us=row, per_context_us=context
        )

    @property
    def margin_us(self) -> int:
        """What 95 % of the last steps took longer than predicted at most; 0 without data."""
        if self._margin is None:
            errors = sorted(self._errors)
            rank = max(1, len(errors) * _MARGIN_RANK // _MARGIN_WINDOW)
            self._margin = max(0, errors[-rank])
        return self._margin

    def observe(self, shape: StepShape, execute_us: int) -> None:
        """Takes the duration of one step into account.

        Args:
            shape: of the step.
            execute_us: how long the worker computed; ignored unless positive.
        """
        if execute_us <= 0 or shape.tokens <= 0:
            return
        self._seen += 1
        if not self._seen:
            return
        tokens = shape.tokens
        beta = self._beta
        prefill = tokens - shape.rows
        if prefill > 0:
            self._largest_prefill = max(self._largest_prefill, prefill)
            self._decodes_alone = 0
        else:
            self._decodes_alone += 1
        if beta is None:
            self._min_tokens = min(self._min_tokens, tokens)
            self._max_tokens = max(self._max_tokens, tokens)
            self._pending.append((tokens, shape.rows, shape.context, execute_us, 0.0))
            if len(self._pending) >= _SOLVE_EVERY_AT_FIRST:
                self._learn()
            return
        predicted = beta[0] + beta[1] * tokens + beta[2] * shape.rows + beta[3] * shape.context
        self._pending.append((tokens, shape.rows, shape.context, execute_us, predicted))
        if (
            len(self._pending) >= _SOLVE_EVERY
            or prefill > self._fitted_prefill
            or execute_us > _SURPRISE * predicted
        ):
            self._learn()

    def predict_us(self, shape: StepShape) -> int | None:
        """How long a step takes, microseconds; None before the model has data."""
        if self._beta is None:
            return None
        return int(self._duration(shape.tokens, shape.rows, shape.context) + 0.5)

    def tokens_within(self, target_us: int, shape: StepShape, context: int) -> int | None:
        """Most prefill tokens one more row may add to a step that is to stay within a target.

        At most twice as many prefill tokens in a step as were ever seen: times are not linear in
        them, so the model has to see more of them before it believes more of them.

        Args:
            target_us: wanted duration of the step, microseconds.
            shape: the step so far.
            context: KV tokens computed already of the prompt that the chunk belongs to.

        Returns:
            0 where even the row alone exceeds the target, but for a probe after `_PROBE_EVERY`
            steps without prefills if `shape` itself stays within it. None before the model has
            data.
        """
        if self._beta is None:
            return None
        limit = min(
            target_us - self.margin_us,
            target_us * _EXCESS_UNIT // (_EXCESS_UNIT + self._relative_excess()),
        )
        room = limit - self._duration(shape.tokens, shape.rows + 1, shape.context + context)
        prefill = shape.tokens - shape.rows
        least = 0
        if self._decodes_alone >= _PROBE_EVERY and not prefill:
            alone = self._duration(shape.tokens, shape.rows, shape.context)
            least = _FIRST_CHUNK if alone + self.margin_us <= target_us else 0
        if room <= 0:
            return least
        explored = max(_FIRST_CHUNK, 2 * self._largest_prefill) - prefill
        per_token = self._beta[1] + self._beta[3]
        if per_token * explored > room:
            return max(least, int(room / per_token))
        return max(0, explored)

    def _duration(self, tokens: int, rows: int, context: int) -> float:
        assert self._beta is not None
        base, per_token, per_row, per_context = self._beta
        return base + per_token * tokens + per_row * rows + per_context * context

    def _relative_excess(self) -> int:
        """How much longer than predicted steps with prefills take, in 1/`_EXCESS_UNIT`."""
        if self._limit is None:
            excess = sorted(self._excess)
            known = 0
            if excess:
                core = excess[-max(1, len(excess) * _EXCESS_CORE_RANK // _EXCESS_WINDOW)]
                known = min(excess[-1], 2 * max(0, core) + _EXCESS_UNIT // 32)
            least = _EXCESS_LEAST if len(excess) >= _EXCESS_KNOWN else _EXCESS_AT_FIRST
            self._limit = max(known, least)
        return self._limit

    def _learn(self) -> None:
        """Takes what was observed since the last time into the sums, and solves them."""
        decodes: list[tuple[int, int, int, int]] = []
        prefills: list[tuple[int, int, int, int]] = []
        for tokens, rows, context, execute_us, predicted in self._pending:
            counted = self._compared(execute_us, predicted, prefills=tokens > rows)
            if tokens > rows:
                prefills.append((tokens, rows, context, counted))
            else:
                decodes.append((tokens, rows, context, counted))
        while abs(self._drift) >= _DRIFT:
            self._drift = int(self._drift / 2)
            self._decodes.forget()
            self._prefills.forget()
        if decodes:
            self._decodes.add(decodes)
        if prefills:
            self._prefills.add(prefills)
        self._fade(len(decodes), len(prefills))
        self._pending.clear()
        self._margin = None if self._errors else 0
        self._limit = None
        known = (
            self._max_tokens >= _MIN_TOKEN_RATIO * self._min_tokens
            and self._seen >= _MIN_OBSERVATIONS
        )
        if self._beta is not None or known or self._seen >= _ENOUGH_OBSERVATIONS:
            self._fitted_prefill = self._largest_prefill
            self._beta = _solve(self._decodes, self._prefills, self._beta)

    def _compared(self, execute_us: int, predicted: float, *, prefills: bool) -> int:
        """Notes how a step compares with its prediction; gives the duration to learn from."""
        if predicted <= 0:
            return execute_us
        error = execute_us - int(predicted)
        self._errors.append(error)
        if prefills:
            self._excess.append(min(int(error * _EXCESS_UNIT / predicted), _EXCESS_LIMIT))
        if execute_us > _SURPRISE * predicted:
            self._drift += 1
        elif execute_us < _BRISK * predicted:
            self._drift -= 1
        elif self._drift:
            self._drift = int(self._drift / 2)
        if error > predicted and self._drift < _DRIFT // 2:
            return min(execute_us, int(predicted * _OUTLIER))
        return execute_us

    def _fade(self, decodes: int, prefills: int) -> None:
        """Forgets what prefills cost, slowly, while there are few of them."""
        self._since_halved = 0 if prefills else self._since_halved + decodes
        if self._since_halved >= _PREFILL_MEMORY:
            self._since_halved = 0
            self._prefills.halve()
        self._fading = max(0, self._fading + decodes - _EXCESS_HOLD * prefills)
        if self._fading >= _EXCESS_FADE:
            self._fading = 0
            self._excess = deque((value >> 1 for value in self._excess), _EXCESS_WINDOW)


class _Sums:
    """Sums of products of (1, tokens, rows, context) with each other and with the duration."""

    __slots__ = ("values",)

    def __init__(self) -> None:
        self.values: tuple[int, ...] = (0,) * 14

    def add(self, steps: list[tuple[int, int, int, int]]) -> None:
        """Adds steps, each of t tokens, r rows and c context tokens that took `us`."""
        n = len(steps)
        st = sr = sc = tt = tr = tc = rr = rc = cc = y = yt = yr = yc = 0
        for t, r, c, us in steps:
            st += t
            sr += r
            sc += c
            tt += t * t
            tr += t * r
            tc += t * c
            rr += r * r
            rc += r * c
            cc += c * c
            y += us
            yt += t * us
            yr += r * us
            yc += c * us
        added = (n, st, sr, sc, tt, tr, tc, rr, rc, cc, y, yt, yr, yc)
        self.values = tuple(
            [a + (b << _FRACTION_BITS) for a, b in zip(self.values, added, strict=True)]
        )
        if self.values[0] >= _MEMORY << _FRACTION_BITS:
            self.halve()

    def forget(self) -> None:
        """Forgets half of everything unless that would leave too little to go by."""
        if self.values[0] >= 4 << _FRACTION_BITS:
            self.halve()

    def halve(self) -> None:
        """Forgets half of everything."""
        self.values = tuple([value >> 1 for value in self.values])


def _solve(decodes: _Sums, prefills: _Sums, before: _Vector | None) -> _Vector:
    """Non-negative coefficients that explain the sums, near `before` where they say nothing."""
    n, st, sr, sc, tt, tr, tc, rr, rc, cc, *moments = [
        a + b for a, b in zip(decodes.values, prefills.values, strict=True)
    ]
    gram = ((n, st, sr, sc), (st, tt, tr, tc), (sr, tr, rr, rc), (sc, tc, rc, cc))
    norms = [math.sqrt(gram[i][i]) for i in range(4)]
    active = [i for i in range(4) if norms[i] > 0]
    old = before or (0.0, 0.0, 0.0, 0.0)
    kept = list(old)
    while active:
        matrix = [
            [gram[i][j] / (norms[i] * norms[j]) + (_RIDGE[i] if i == j else 0.0) for j in active]
            + [moments[i] / norms[i] + _RIDGE[i] * old[i] * norms[i]]
            for i in active
        ]
        solution = _eliminate(matrix)
        worst = min(range(len(active)), key=solution.__getitem__)
        if solution[worst] >= 0:
            for i, value in zip(active, solution, strict=True):
                kept[i] = value / norms[i]
            break
        kept[active.pop(worst)] = 0.0
    return kept[0], kept[1], kept[2], kept[3]


def _eliminate(matrix: list[list[float]]) -> list[float]:
    """Solves a positive definite system, [n, n + 1] with its right side, in place."""
    size = len(matrix)
    for k in range(size):
        pivot = matrix[k]
        for i in range(k + 1, size):
            row = matrix[i]
            factor = row[k] / pivot[k]
            for j in range(k + 1, size + 1):
                row[j] -= factor * pivot[j]
    solution = [0.0] * size
    for k in range(size - 1, -1, -1):
        value = matrix[k][size]
        for j in range(k + 1, size):
            value -= matrix[k][j] * solution[j]
        solution[k] = value / matrix[k][k]
    return solution
