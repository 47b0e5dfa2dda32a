"""How many requests a server bears: additive increase, multiplicative decrease, and rests for one that fails.

Starts low and doubles with every round of answers until the first sign of overload (429, 503, a timeout, answers that
take more than half of their timeout); then it grows by one a round and shrinks by a third at each sign, once a round:
requests that were sent before the last decrease say nothing about the present limit.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

START = 32
SHRINK = 0.67
SMOOTHING = 0.1
FAILURES_BEFORE_REST = 3
LONGEST_REST_S = 30.0


@dataclass
class Limit:
    """The state of one server. Times are those of `clock`, in seconds."""

    most: int
    slow_s: float
    """Answers that take longer than this on average are a sign of overload."""
    clock: Callable[[], float]
    in_flight: int = 0
    rest_until: float = 0.0
    _allowed: float = field(init=False)
    _busiest: int = 0
    _seconds: float = 0.0
    _failures: int = 0
    _doubling: bool = True
    _shrunk_at: float = -math.inf
    _failed_at: float = -math.inf

    def __post_init__(self) -> None:
        self._allowed = float(min(START, self.most))

    @property
    def allowed(self) -> int:
        """Requests that may be in flight now, rests left aside."""
        return int(self._allowed)

    @property
    def free(self) -> int:
        """How many more may be sent now."""
        return 0 if self.clock() < self.rest_until else self.allowed - self.in_flight

    def take(self) -> None:
        """A request is sent."""
        self.in_flight += 1
        self._busiest = max(self._busiest, self.in_flight)

    def give(self) -> None:
        """A request is over."""
        self.in_flight -= 1

    def answered(self, sent_at: float) -> None:
        """An answer came to a request that was sent at this time."""
        self._failures = 0
        seconds = self.clock() - sent_at
        self._seconds = seconds if not self._seconds else self._seconds + SMOOTHING * (seconds - self._seconds)
        if self._seconds > self.slow_s:
            self.overloaded(sent_at)
        elif self._allowed < 2 * self._busiest:  # a limit that nobody comes near says nothing about a higher one
            self._allowed = min(float(self.most), self._allowed + (1.0 if self._doubling else 1.0 / self._allowed))

    def overloaded(self, sent_at: float, rest_s: float = 0.0) -> None:
        """The server said, or showed, that it has too much to do; `rest_s`: how long it asks to be left alone."""
        self.rest_until = max(self.rest_until, self.clock() + min(rest_s, LONGEST_REST_S))
        if sent_at > self._shrunk_at:
            self._allowed = max(1.0, self._allowed * SHRINK)
            self._doubling, self._busiest = False, self.in_flight
            self._shrunk_at = self.clock()

    def failed(self, sent_at: float) -> None:
        """No usable answer: refused connections, resets, 500. Several rounds in a row earn a rest, longer each time."""
        if sent_at <= self._failed_at:
            return
        self._failures, self._failed_at = self._failures + 1, self.clock()
        if self._failures >= FAILURES_BEFORE_REST:
            rest_s = min(LONGEST_REST_S, 0.5 * 2.0 ** min(self._failures - FAILURES_BEFORE_REST, 10))
            self.rest_until = max(self.rest_until, self.clock() + rest_s)
