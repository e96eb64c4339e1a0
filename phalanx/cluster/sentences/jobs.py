"""What the reasons of ``cluster.jobs`` say: a job from its submission to its end."""

from __future__ import annotations

SENTENCES = {
    # admission
    "bad_field": "{key} = {value}: {rule}",
    "bad_constraint": "{problem}",
    "unknown_feature": "no node of the fleet has {features}",
    "deadline_past": "its deadline passed {ago} ago: give a later one",
    "deadline_near": "it needs {needed} and has {left} until its deadline: give a later deadline, a"
    " shorter time limit, or begin sooner",
    "too_many_jobs": "{who} has {kept} jobs that have not ended: {count} more would be above"
    " {most} (policy: {setting})",
    "over_budget": "{steps} steps would take about {needed} GPU-hours and the budget is "
    "{budget}: lower the steps, raise the budget, or force it",
    "not_planned": "its times are defaults until they are measured: {problem}",
    # pipelines
    "bad_pipeline": "{problem}",
    "pipeline_accepted": "pipeline run {pipeline} has begun",
    "too_many_pipelines": "{user} has {most} runs of pipelines that have not ended: wait for some,"
    " or cancel them",
    "pipeline_runs": "run {pipeline} uses {folder}: wait for its end, or cancel it",
    "pipeline_incomplete": "the submission lacks {what}",
    "pipeline_path": "{path}: a path on a server must be printable, without quotes and backslashes",
    "pipeline_is": "run {pipeline} of {name} is {state}",
    "no_such_pipeline": "there is no pipeline run {pipeline}",
    "pipeline_ended": "pipeline run {pipeline} is {state} already",
    "nothing_asked": "pipeline run {pipeline} asks nothing called {task}",
    # budget
    "budget_raised": "its budget was raised while it stopped",
    "budget_used": "job {job} stops because it has used {used} GPU-seconds: set a budget above"
    " that, 0 for none, or force it",
    "budget_nearly": "has used {percent} % of its budget of {gpu_hours} GPU-hours",
    # dependencies
    "dependency": "waits for other jobs ({count}), the first is {job}",
    "dependency_never": "can never start: job {job}, which must succeed first, {state}",
    "dependency_never_fails": "can never start: job {job}, which must fail first, succeeded",
    "dependency_stuck": "waits for job {job}, which can never start: cancel that one",
    "array_width": "its array runs at most {width} jobs at a time",
    "held": "held by a person",
    "operator_holds": "only an operator can let job {job} in again: it is {why}",
    "unknown_dependency": "depends on job {job}, which does not exist",
    "cycle": "the jobs wait for each other in a circle: {cycle}",
    "unknown_step": 'job "{job}" waits for "{missing}", which is not in the workflow',
    "awaits_too_many": "{jobs} jobs that wait for {others} others each: at most {most} such pairs"
    " are taken at a time",
    "user_awaits_too_many": "jobs of this user wait for {pairs} others in all, each counted for"
    " itself, and {most} is the most: wait until some have ended",
    "no_steps": "a workflow needs at least one job",
    "named_twice": 'two jobs of the workflow are named "{job}"',
    # elastic
    "scale": "{replicas} replicas were asked for",
    "scaled_in_part": "accepted, but {why}: it gets no more until that limit is raised",
    "not_elastic": "job {job} runs with {least} to {most} replicas",
    "not_divisible": "job {job} has {replicas} replicas that share nodes: they come and leave"
    " {together} at a time",
    "not_resizable": "the {replicas} replicas of job {job} share nodes unevenly: their number"
    " changes only while it is pending",
    # feasibility
    "unknown_qos": 'there is no class of service "{qos}": {nearest}',
    "qos_closed": "class of service {qos} is for {teams}, not for team {team}",
    "unknown_partition": 'no node is in partition "{partition}": {nearest}',
    "partition_closed": "partition {partition} is for {teams}, not for team {team}",
    "partitions_barred": "its team or its time limit keeps it out of {partitions}, and"
    " elsewhere: {why}",
    "time_limit_missing": "{what} limits the time of its jobs to {most} s: set time_limit_ns",
    "time_limit_too_long": "it wants {wanted} s and {what} allows {most} s",
    "too_many_gpus": "it needs {gpus} GPUs and {what} allows {most}",
    "never_as_is": "can never start as things are: {why}; {change}",
    # leave_cause
    "time_limit": "ran into its time limit of {seconds} s at step {step}",
    "deadline": "its deadline passed at step {step}",
    "budget": "used its budget of {gpu_hours} GPU-hours; raise it or force it to go on",
    "preempted_for": "job {job} has a class of service that preempts, and needs its nodes",
    "reclaimed": "team {team} holds {held} GPUs and owns {owned}: job {job} of team"
    " {lender} needs what it lent",
    "turn": "job {job} has waited {span}, and team {team} holds {held} GPUs and owns"
    " {owned}: borrowers take turns",
    "window_opens": "its nodes must be free for {name}",
    "room_never": "no room for the checkpoint of step {step} in {times}"
    " attempts: its last {steps} steps were only in memory and are LOST; its newest checkpoint"
    " is step {durable}",
    "storage_ended": "its storage failed {times} times in a row: {evidence}",
    "storage_never": "its storage failed {times} times in a row:"
    " {evidence} Its last {steps} steps were only in memory and are LOST; its newest checkpoint"
    " is step {durable}",
    # lifecycle
    "queued": "in the queue",
    "begins": "it was submitted to begin later",
    "deadline_unreachable": "it did not start in time for its deadline: it would need the {needed}"
    " that are left until then",
    "finished": "did all its steps",
    "not_archived": "did all its steps, but not all is in the archive: {what}. The checkpoints are"
    " on disk: copy their folders there, or submit the job again",
    "program_ended": "its program ended by itself, without an error",
    # own_mapping
    "own_mapping": "its nodes are there again: it returns at a step boundary from {before} to its"
    " own mapping ({after}), which is predicted to gain {gain} GPU seconds",
    # replan
    "replanned": "changes at a step boundary ({settings}), asked for by {by}: from {before} to"
    " {after}",
    "restaged": "stops at a step boundary and goes on with other stages ({settings}), asked for by"
    " {by}: all steps up to {step} stay as they are",
    "stages_read": "nothing was changed: step {first} would be another one, and job {job} has made"
    " {step} steps; the earliest that can still be another is step {earliest}",
    "change_too_late": "goes on as it was: step {first} was to be the first with other stages, and"
    " was made before the gang had stopped; step {earliest} is the earliest now: ask again",
    "no_change": "job {job} is so already: nothing was changed",
    "change_no_place": "nothing was changed, since the gang has no place as it would be: {why}",
    "change_at_limit": "it would take {more} GPUs more, and team {team} with class of service {qos}"
    " may take {left}",
    "change_unsafe": "the last steps of job {job} are only in memory of nodes that it left: ask"
    " again once it runs",
    "change_waits": "its state is safe, but there is no place for it as changed: {why}; it waits",
    "change_dropped": "goes on as it was: it left its nodes before its state was safe, so the"
    " change was not carried out; ask again once it runs",
    "changed_again": "job {job} is being changed already ({settings}): ask again once it runs",
    # requests
    "no_such_job": "there is no job {job}",
    "job_ended": "job {job} has already ended ({state})",
    "not_pending": "job {job} is {state}; only a pending or draining job can be held",
    "not_running": "job {job} is {state}; only a running job can be sent back to the queue",
    "leaving": "job {job} is about to end ({why}): only what waits or runs can be sent back to"
    " the queue or held",
    "no_array": "job {job} is no member of an array",
    "array_ended": "all jobs of the array of job {job} have ended",
    "array_cancelled": "cancelled {count} jobs of the array",
    "array_held": "{count} jobs of the array wait until they are released",
    "array_released": "{count} jobs of the array are released",
    "cancelled": "cancelled by a person",
    "asked_to_end": "asked to end (SIGTERM), and ended in {seconds} s at the latest; cancelled"
    " again it ends at once",
    "requeued": "sent back to the queue by a person",
    "drained": "stopped by a person, and held until it is resumed",
    # submission
    "accepted": "accepted",
    "same_trial": "this trial of its sweep is job {job} already",
    # user_limits
    "priority_limited": "its priority is {most} instead of {asked}, the highest that users set"
    " (policy: users.most_priority)",
    "retries_limited": "it has {most} retries instead of {asked}, the most that users set"
    " (policy: users.most_retries)",
    "webhook_closed": "jobs of users are told to webhooks of {allowed}, not of {host} (policy:"
    " users.webhook_hosts)",
    "mail_closed": "jobs of users send mail to addresses at {allowed}, not at {domain} (policy:"
    " users.mail_domains)",
    "operators_force": "only an operator lets a job go on above its budget (forced)",
    # write_leases
    "flush": "{writing} of {most} jobs write to remote storage",
    "storage_down": "remote storage gives and takes nothing; checkpoints wait",
    "storage_slow": "a checkpoint took {seconds} s to write, and {usual} s as a rule: later ones "
    "are given as much as the storage takes now",
    "storage_fast": "checkpoints are written as fast as before",
    "storage_back": "remote storage is back",
}
