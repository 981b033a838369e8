"""What a connection may cost the server without being useful.

A point stands for about 10 µs of the loop's time. Each connection has two balances. Its *budget*
bounds the total: useless frames and failed calls take points; useful ones, and time, give points
back; a connection whose budget is empty is ended, as HAProxy, Envoy and nghttp2 end theirs. Its
*owed time* bounds the rate: more is read once `fairness.OverheadLimiter` has had room for it.

Each cost is about the processor time that the server needs, in points, and checked by
`python -m tools.lab.bench abuse`.
Source: CVE-2019-9511 to 9518, CVE-2023-44487, CVE-2024-27316, CVE-2025-8671.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from grpc_service.rpc.limits import Limits

T = TypeVar("T")

NO_OP_FRAME = 1.0  # a frame without any effect, which h2 never gets
WINDOW_UPDATE = 1.0
PING = 4.0
H2_FRAME = 4.0  # a frame without much effect that h2 sees
FRAGMENT = 3.0  # received bytes that complete no frame: owed time only
SETTING = 0.5  # for each entry of SETTINGS
SETTINGS_MAX = 100  # entries that a SETTINGS frame may have; clients send up to seven. Guess.
VISIT = 0.1  # for each stream that waits when the connection's window opens: owed time only
SETTINGS_FRAME = 10.0
SETTINGS_STREAM = 0.1  # for each open stream when SETTINGS arrives
SMALL_DATA = 4.0  # a DATA frame of fewer than `SMALL_DATA_BYTES`
RESET_CALL = 10.0
LOST_CALL = 25.0  # a call that its client ended before the first answer: owed time only
WAITING_CALL = 20.0  # a call until its request comes: owed time only, and not owed afterwards
WINDOWLESS_CALL = 20.0  # a call begun while the client's window is closed: owed time only
EVICTED_CALL = 500.0  # a call ended because the server keeps too many bytes (`HeldBytes`)
BROKEN_CONNECTION = 300.0  # a connection that ended by an error, or without budget: owed time only
FAILED_CALL = 40.0  # a call that was refused or malformed, or ended with an error
HEADER_BYTE = 0.01  # each byte of a header list beyond `HEADER_BYTES_FREE`
HEADER_BYTES_FREE = 1024
INFLATED_BYTE = 4e-4  # a message's byte beyond `framing.INFLATION_FREE` times its compressed size
FAILED_BYTE = 1.6e-4  # a byte of a failed call's request, for reading and parsing: owed time only
GOOD_CALL = 30.0  # given back for a call that ended with OK
SENT_DATA = 6.0  # given back per DATA frame sent: clients answer by two window updates and a ping
OPENING = 30.0  # owed for a new connection; with the costs of its first frames below `OWED_MIN`
SERVING = 90.0  # owed at a connection's end, beside the costs of its frames and calls
CONNECTION = OPENING + SERVING
LEFT_CONNECTION = 20.0  # owed by the address of a client that leaves before anything is done for it
SMALL_DATA_BYTES = 64
USEFUL_DATA_BYTES = 1024  # smaller parts of a message, except the last, earn no `SENT_DATA`
POINT_S = 1e-5  # seconds of the loop for one point
OWED_MIN = 50.0  # while it owes fewer points, a connection does not wait
# Upper bound of an address's debt, in seconds of the loop: at the default share, a wait of 2 s if
# no other address waits. Guess.
DEBT_MAX_S = 0.2
ADDRESSES_MAX = 10_000  # whose debts are kept; beyond it the one noted first is forgotten. Guess.


class Account:
    """One connection's budget and owed time, in the unit of the costs above. ``clock`` returns
    seconds. The budget begins at ``share`` (0 to 1) of `Limits.budget`."""

    __slots__ = ("_clock", "_left", "_max", "_owed", "_per_s", "_refilled_at")

    def __init__(self, limits: Limits, clock: Callable[[], float], share: float = 1.0) -> None:
        self._max, self._per_s = limits.budget, limits.budget_per_s
        self._clock = clock
        self._left = share * self._max
        self._owed = OPENING  # points that were taken and not waited for (`take_owed_s`)
        self._refilled_at = clock()

    def charge(self, points: float) -> None:
        """Take points from the budget, and owe their time."""
        self._left -= points
        self._owed += points

    def owe(self, points: float) -> None:
        """Owe the time of ``points``, and keep the budget: honest clients cause such costs, too."""
        self._owed += points

    def earn(self, points: float) -> None:
        """Give points back for something useful."""
        self._left = min(self._max, self._left + points)
        self._owed = max(-self._max, self._owed - points)

    def take_owed_s(self) -> float:
        """Return the owed time in seconds, and set it to 0; return 0 below `OWED_MIN` points."""
        return self.take_debt_s() if self._owed >= OWED_MIN else 0.0

    def take_debt_s(self) -> float:
        """Return the owed time in seconds, however little, and set it to 0."""
        owed, self._owed = max(0.0, self._owed), 0.0
        return owed * POINT_S

    def is_empty(self) -> bool:
        """Return whether the budget is used up, after the points that time has given back."""
        if self._left >= 0:
            return False
        now = self._clock()
        self._left = min(self._max, self._left + self._per_s * (now - self._refilled_at))
        self._refilled_at = now
        return self._left < 0


class Addresses:
    """What is remembered of clients' addresses, so that a client gains nothing by connecting anew.

    An address whose client's budget was empty has `Limits.offender_share` of a budget for a while.
    When a connection ends, the time that it owes becomes a debt of its address, which shrinks as
    fast as `fairness.OverheadLimiter` would have let the connection pay. The address's next
    connection waits until the remaining debt is paid.
    """

    def __init__(self, limits: Limits, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._clock = clock
        self._offences: dict[str, float] = {}  # by address: when it is trusted again
        self._debts: dict[str, tuple[float, float]] = {}  # seconds owed, and since when

    def note_offence(self, address: str) -> None:
        """Remember an address whose client cost too much."""
        _remember(self._offences, address, self._clock() + self._limits.offender_time_s)

    def budget_share(self, address: str) -> float:
        """Return the part of a budget that a new connection begins with."""
        is_offender = self._offences.get(address, 0.0) > self._clock()
        return self._limits.offender_share if is_offender else 1.0

    def add_debt_s(self, address: str, seconds: float) -> None:
        """Add what a connection owes at its end."""
        if debt_s := self.take_debt_s(address) + seconds:
            _remember(self._debts, address, (min(debt_s, DEBT_MAX_S), self._clock()))

    def take_debt_s(self, address: str) -> float:
        """Return the seconds that an address owes, and set them to 0; the caller waits for them."""
        debt_s, since = self._debts.pop(address, (0.0, 0.0))
        return max(0.0, debt_s - self._limits.overhead_share * (self._clock() - since))


def _remember(memory: dict[str, T], address: str, value: T) -> None:
    memory.pop(address, None)
    memory[address] = value
    if len(memory) > ADDRESSES_MAX:
        del memory[next(iter(memory))]
