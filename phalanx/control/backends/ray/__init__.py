"""Ray: agents as actors on an existing cluster, spread over its nodes by placement groups.

The process that submits leads the job; under ``ray job submit`` that is Ray's job itself.
"""

from __future__ import annotations
