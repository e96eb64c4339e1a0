"""What a rank does with the Python that its job brings along, beside building the model."""

from __future__ import annotations

from phalanx.checkpoint import Checkpointer
from phalanx.config import ConfigError, Job
from phalanx.config.own_code import code_versions, load_class
from phalanx.train.callback import Callback
from phalanx.train.post_training import post_training_callbacks


def own_callbacks(job: Job) -> list[Callback]:
    """New ones: of the job's post-training, and of the classes that it names.

    Its files are imported already.
    """
    names = enumerate(job.code.callbacks)
    own = [load_class(f"code.callbacks[{i}]", name, Callback)() for i, name in names]
    return [*post_training_callbacks(job), *own]


def refuse_other_code(job: Job, checkpointer: Checkpointer) -> None:
    """Raise ``ConfigError`` where this rank imported another text than rank 0; collective.

    A file may change while a job runs: survivors of a fault have the old one, new ranks the new.
    """
    if not job.code.files:
        return
    ours = code_versions(job.code)
    for file, version in checkpointer.agreed(ours).items():
        if ours[file] != version:
            rule = "is another text here than where rank 0 runs, or has changed since the job began"
            fix = "give every node the same file, and start the job again from its checkpoint"
            raise ConfigError("code.files", f'"{file}"', rule, fix)
