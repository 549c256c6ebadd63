"""How a command ends whose work can be stopped and taken up again."""

from __future__ import annotations

import sys

from .arguments import fail


def carried_out(work, again: str, table, begun=lambda: True) -> int:
    """Do the work of a run that can be resumed by `again`, print its table. Returns the exit code.

    table: prints the result; may return another exit code than 0.
    begun: whether a checkpoint is there to go on from, asked when the disk has given out.
    """
    from ..train import Refused, Stopped

    try:
        result = work()
    except Refused as error:
        fail(str(error))
    except Stopped as error:
        fail(f"{error}; once there is room: {again if begun() else 'the same command'}", code=1)
    except KeyboardInterrupt:
        print(f"\nstopped at once; the last checkpoint goes on with: {again}", file=sys.stderr)
        return 130
    if not result.finished:
        print(f"saved after {result.at}; to go on: {again}")
        return 128 + result.signal
    return table(result) or 0
