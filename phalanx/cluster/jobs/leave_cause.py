"""Why a job leaves its nodes, where the way in which it leaves depends on it."""

from __future__ import annotations

from phalanx.cluster.reasons import Code


class LeaveCause(Code):
    """What makes a job leave; it is kept as the code of the job's reason."""

    TIME_LIMIT = "time_limit"
    DEADLINE = "deadline"
    BUDGET = "budget"
    PREEMPTED = "preempted_for"
    RECLAIMED = "reclaimed"
    TURN = "turn"
    WINDOW = "window_opens"
    REPLANNED = "replanned"
    RESTAGED = "restaged"
    OWN_MAPPING = "own_mapping"
    NO_ROOM_TO_SAVE = "room_never"
    STORAGE_FAILED = "storage_ended"
    STORAGE_FAILED_WITH_LOSS = "storage_never"


# Others wait for its nodes: whoever leaves for these has its grace, and no more.
FOR_OTHERS = (LeaveCause.PREEMPTED, LeaveCause.RECLAIMED, LeaveCause.TURN, LeaveCause.WINDOW)
# Nothing of it can be saved any more.
STORAGE_GONE = (
    LeaveCause.NO_ROOM_TO_SAVE,
    LeaveCause.STORAGE_FAILED,
    LeaveCause.STORAGE_FAILED_WITH_LOSS,
)
