"""Why a job leaves its nodes, where the way in which it leaves depends on it."""

from __future__ import annotations

from phalanx.cluster.reasons import Code, sentences


class LeaveCause(Code):
    """What makes a job leave; it is kept as the code of the job's reason."""

    TIME_LIMIT = "time_limit"
    BUDGET = "budget"
    PREEMPTED = "preempted_for"
    RECLAIMED = "reclaimed"
    TURN = "turn"
    WINDOW = "window_opens"
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

sentences(
    {
        LeaveCause.TIME_LIMIT: "ran into its time limit of {seconds} s at step {step}",
        LeaveCause.BUDGET: "used its budget of {gpu_hours} GPU-hours; raise it or force it to go"
        " on",
        LeaveCause.PREEMPTED: "job {job} has a class of service that preempts, and needs its nodes",
        LeaveCause.RECLAIMED: "team {team} holds {held} GPUs and owns {owned}: job {job} of team"
        " {lender} needs what it lent",
        LeaveCause.TURN: "job {job} has waited {span}, and team {team} holds {held} GPUs and owns"
        " {owned}: borrowers take turns",
        LeaveCause.WINDOW: "its nodes must be free for {name}",
        LeaveCause.NO_ROOM_TO_SAVE: "no room for the checkpoint of step {step} in {times}"
        " attempts: its last {steps} steps were only in memory and are LOST; its newest checkpoint"
        " is step {durable}",
        LeaveCause.STORAGE_FAILED: "its storage failed {times} times in a row: {evidence}",
        LeaveCause.STORAGE_FAILED_WITH_LOSS: "its storage failed {times} times in a row:"
        " {evidence} Its last {steps} steps were only in memory and are LOST; its newest checkpoint"
        " is step {durable}",
    }
)
