"""What a rank says of an error that ended its wait, if nobody has said anything before."""

from objcomm.errors import DesyncError, TransportError, TransportTimeout, text_of
from objcomm.outcome import failure_of
from objcomm.transport.verdict import Cause, Verdict


def proposal_for(error: BaseException, rank: int) -> Verdict:
    """The verdict that ``error`` on ``rank`` calls for."""
    if isinstance(error, DesyncError):
        positions = tuple(error.positions.values())
        return Verdict.of(Cause.DESYNC, reason=error.reason, positions=positions)
    if isinstance(error, TransportTimeout):
        return Verdict.of(Cause.TIMEOUT, ranks=error.missing, seconds=error.seconds)
    if isinstance(error, TransportError):
        return Verdict.of(Cause.LOST, ranks=error.peers, reason=error.reason)
    if isinstance(error, Exception):
        # A message was refused, or memory is missing, of which torch says so by a RuntimeError: the
        # connections are at fault in none of these, because what they raise has its name by now.
        return Verdict.of(Cause.REFUSED, failures=(failure_of(error, rank),))
    reason = f"it left after {text_of(error)}"
    return Verdict.of(Cause.LEFT, ranks=(rank,), reason=reason)
