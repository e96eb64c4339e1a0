"""Rules for what a job names of its own Python. Nothing is imported to check them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from phalanx.config.errors import ConfigProblem, problem
from phalanx.config.schema import Job

REFERENCE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*|[A-Za-z][\w.-]*")
FORM = 'write "package:Class", or the name of an installed plug-in'


def own_code_problems(job: Job) -> Iterator[ConfigProblem]:
    """Everything in a job's own code that cannot work, wherever it lies."""
    named = {
        "model.module": job.model.module,
        "model.loss": job.model.loss,
        "data.module": job.data.module,
        "optimizer.module": job.optimizer.module,
        **{f"code.callbacks[{i}]": each for i, each in enumerate(job.code.callbacks)},
    }
    for key, reference in named.items():
        if (reference or "callbacks" in key) and not REFERENCE.fullmatch(reference):
            yield problem(key, f'"{reference}"', "must name a class", FORM)
    for i, file in enumerate(job.code.files):
        if not file.endswith(".py"):
            rule = "must be a Python file"
            yield problem(f"code.files[{i}]", f'"{file}"', rule, "name a file such as my_model.py")
    if (job.data.source == "module") != bool(job.data.module):
        fix = 'give both data.source = "module" and data.module, or none of them'
        rule = f'with data.source = "{job.data.source}" it names no samples'
        yield problem("data.module", f'"{job.data.module}"', rule, fix)
    if job.optimizer.module and job.optimizer.kind != "adamw":
        rule = "takes the place of optimizer.kind"
        fix = "leave out optimizer.kind"
        yield problem("optimizer.module", f'"{job.optimizer.module}"', rule, fix)
    if job.optimizer.module and job.memory.offload == "optimizer":
        rule = "optimizer.module keeps its state on the device"
        yield problem("memory.offload", '"optimizer"', rule, 'set it to "none"')
