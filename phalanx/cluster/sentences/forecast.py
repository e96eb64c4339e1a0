"""What the reasons of ``cluster.forecast`` say: what a job waits for, and how long."""

from __future__ import annotations

SENTENCES = {
    # queue_position
    "waits_for_room": "{problem}; jobs ahead of it: {ahead}",
    "waits_for_window": "its nodes are wanted for {name} before it would be sure to have ended"
    " (its time limit: {limit})",
    "kept_for_others": "there is room, but it is promised to job {job} in {span}, before this"
    " job would be sure to have ended (its time limit: {limit})",
    "collected_for": "there is room, but what becomes free is collected for job {job}, which"
    " has waited {span}",
    "next_look": "it has room and starts at the next look at the queue",
    "beyond_depth": "there is room, but {ahead} jobs are ahead of it and the queue looks at"
    " {depth} at a time",
    "nodes_away": "{problem}; of the nodes that would do {there} of {fitting} are in service,"
    " and nobody can say when the others come back",
    "holder_endless": "job {job}, which holds what it needs, has neither a time"
    " limit nor a number of steps",
    "holder_late": "job {job}, which holds what it needs, should have ended by now",
    "ahead_endless": "job {job}, which is before it, has neither a time limit nor a number of"
    " steps",
    "limit_endless": "{problem}; nobody can say when those end that hold it",
    "endless": "it has neither a time limit nor a number of steps",
    "overdue": "it should have ended by now",
    "no_end": "{problem}; nobody can say when those end that hold what it needs",
    # why
    "waits_for_rest": "{problem}; its own (so many: {nodes}) have its newest steps in memory and"
    " are for nobody else, for {span} at most; it starts as soon as the others are there",
    "promised": "{problem}; {kept} kept for it, and it starts in {span} at the latest",
    "promised_about": "{problem}; {kept} kept for it, and it starts in {span} ({doubt})",
    "others_leave": "{jobs} jobs are asked to leave for it, and it starts in {span}",
    "saved_for": "what {what} may hold is saved for job {job}, which has waited {span}",
    "saved_open": "what {what} may hold is saved for job {job}, which has waited {span}; {blame}",
    "guests_stay": "{problem}; jobs that run on what team {team} lent: {guests}, and the first"
    " can be asked to leave in {span}",
    "held_open": "held by a person: nobody can say when it starts until it is released{then}",
    "dependency_open": "waits for other jobs ({count}), the first is {job}; nobody can say"
    " until when: {blame}",
    "array_turn": "its array runs at most {width} jobs at a time; members before it: {ahead}",
    "array_open": "its array runs at most {width} jobs at a time; nobody can say when it is"
    " its turn: {blame}",
}
