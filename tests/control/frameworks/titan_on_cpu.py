"""What torchtitan must be told to compute on CPUs, as its ``experimental.custom_import``.

It takes a machine without an accelerator for one with CUDA, and scales gradients in a way that
NCCL has and gloo has not.
"""

from types import SimpleNamespace

from torch.distributed.fsdp import FSDPModule
from torchtitan.components import checkpoint, metrics
from torchtitan.distributed import parallel_dims
from torchtitan.distributed import utils as distributed
from torchtitan.tools import utils
from waiting import wait_to_be_killed

CPU = SimpleNamespace(
    set_device=lambda device: None,
    current_device=lambda: 0,
    synchronize=lambda: None,
    get_device_name=lambda device: "CPU",
    get_device_properties=lambda device: SimpleNamespace(total_memory=1 << 30),
    memory_stats=lambda device: {},
    reset_peak_memory_stats=lambda: None,
    empty_cache=lambda: None,
)
for module in (utils, metrics, parallel_dims, distributed):
    module.device_type, module.device_module = "cpu", CPU

divide = FSDPModule.set_gradient_divide_factor


def divide_sums(self, factor) -> None:
    """Gradients are summed, and divided afterwards."""
    self.set_force_sum_reduction_for_comms(True)
    divide(self, factor)


FSDPModule.set_gradient_divide_factor = divide_sums
save = checkpoint.CheckpointManager.save


def save_and_wait(self, curr_step, last_step=False) -> None:
    """Waits to be killed, after the step's checkpoint."""
    save(self, curr_step, last_step)
    wait_to_be_killed(curr_step, at=12)


checkpoint.CheckpointManager.save = save_and_wait
