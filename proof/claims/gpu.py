"""What needs a CUDA device; the bars are those of one H200."""

from __future__ import annotations

from proof.claim import Claim, Figure, Need

SPEED = (Need.CUDA, Need.TITAN)
FAILED = Figure("failed", "tests that failed", at_most=0, timed=False)

GPU = (
    Claim(
        name="speed-1b",
        says="llama3-1b in bf16, sequence 8192, beside torchtitan's own trainer.",
        command="python benchmarks/speed.py --row 1b --windows 5 --steps 4",
        figures=(
            Figure("tokens_per_second", "tokens", "/s", at_least=55_000, regression=0.04),
            Figure("ratio", "of torchtitan", "x", at_least=1.04, regression=0.03),
            Figure("mfu", "MFU", "%", at_least=0.50, regression=0.04),
            Figure("peak_gib", "memory at the peak", "GiB", at_most=62.0),
        ),
        minutes=2,
        needs=SPEED,
    ),
    Claim(
        name="speed-3b",
        says="llama3-3b in bf16, likewise.",
        command="python benchmarks/speed.py --row 3b --windows 4 --steps 3",
        figures=(
            Figure("tokens_per_second", "tokens", "/s", at_least=22_000, regression=0.04),
            Figure("ratio", "of torchtitan", "x", at_least=1.06, regression=0.03),
            Figure("mfu", "MFU", "%", at_least=0.53, regression=0.04),
            Figure("peak_gib", "memory at the peak", "GiB", at_most=92.0),
        ),
        minutes=2,
        needs=SPEED,
    ),
    Claim(
        name="speed-3b-fp8",
        says="llama3-3b with linear layers in fp8, likewise.",
        command="python benchmarks/speed.py --row 3b-fp8 --windows 4 --steps 3",
        figures=(
            Figure("tokens_per_second", "tokens", "/s", at_least=28_500, regression=0.04),
            Figure("ratio", "of torchtitan with torchao", "x", at_least=1.13, regression=0.03),
            Figure("peak_gib", "memory at the peak", "GiB", at_most=80.0),
        ),
        minutes=2,
        needs=SPEED,
    ),
    Claim(
        name="speed-moe",
        says="A mixture of 48 experts (12 layers, width 2048, the best 8 of width 768), sequence "
        "4096, likewise.",
        command="python benchmarks/speed.py --row moe --windows 4 --steps 4",
        figures=(
            Figure("tokens_per_second", "tokens", "/s", at_least=54_500, regression=0.04),
            Figure("ratio", "of torchtitan", "x", at_least=1.50, regression=0.03),
        ),
        minutes=3,
        needs=SPEED,
    ),
    Claim(
        name="speed-1b-64k",
        says="llama3-1b at sequence 65,536; torchtitan with selective recompute, the least with "
        "which it fits.",
        command="python benchmarks/speed.py --row 1b-64k --windows 4 --steps 2",
        figures=(
            Figure("tokens_per_second", "tokens", "/s", at_least=20_500, regression=0.04),
            Figure("ratio", "of torchtitan", "x", at_least=1.12, regression=0.03),
        ),
        minutes=3,
        needs=SPEED,
    ),
    Claim(
        name="large-models",
        says="Models that fill one GPU: 8-bit moments, or optimizer state in host memory.",
        command="python -m benchmarks.large_models",
        figures=(
            Figure("8b_int8_tokens_per_second", "8B, 8-bit moments", "/s", regression=0.04),
            Figure("8b_int8_share", "its model FLOPs, of the 3B's", "x", at_least=0.85),
            Figure("8b_offload_tokens_per_second", "8B, offloaded", "/s", regression=0.04),
            Figure("8b_offload_share", "its model FLOPs, of the 3B's", "x", at_least=0.60),
            Figure("14b_int8_offload_tokens_per_second", "14B, both", "/s", regression=0.05),
            Figure(
                "memory_error",
                "peak memory off what the planner says is in use, at most",
                "%",
                at_most=0.10,
                regression=1.0,
            ),
        ),
        minutes=6,
        needs=(Need.CUDA,),
    ),
    Claim(
        name="plan-gpu",
        says="Calibrated on the card, the planner predicts steps of other shapes there.",
        command="python -m benchmarks.plan_gpu",
        figures=(
            Figure("shapes", "shapes predicted", at_least=6, timed=False),
            Figure("within", "predicted within 5 % of the measured step", at_least=6, timed=False),
            Figure("worst_error", "greatest error of a predicted step", "%"),
            Figure("mean_error", "mean error", "%"),
        ),
        minutes=4,
        needs=(Need.CUDA,),
    ),
    Claim(
        name="plan-memory-gpu",
        says="Memory of our own trainer, predicted without any calibration: shapes and settings, "
        "with segments of the allocator that grow and with fixed ones.",
        command="python -m benchmarks.plan_memory_gpu",
        figures=(
            Figure("runs", "shapes and settings that ran", at_least=20, timed=False),
            Figure("failed", "that ran out of memory", at_most=0, timed=False),
            Figure(
                "allocated_within",
                "what tensors take, predicted within 10 %",
                "%",
                at_least=0.9,
                timed=False,
            ),
            Figure(
                "reserved_within",
                "what the allocator holds, likewise",
                "%",
                at_least=0.9,
                timed=False,
            ),
            Figure(
                "device_within",
                "what is gone from the device, likewise",
                "%",
                at_least=0.9,
                timed=False,
            ),
            Figure("allocated_worst", "greatest error of what tensors take", "%"),
            Figure("reserved_worst", "of what the allocator holds", "%"),
            Figure("device_worst", "of what is gone from the device", "%"),
        ),
        minutes=4,
        needs=(Need.CUDA,),
    ),
    Claim(
        name="state-formats",
        says="Moments in 16 or 8 bits learn as fp32 ones do: 500 steps of the demo's text.",
        command="python -m benchmarks.state_formats",
        figures=(
            Figure("loss", "loss with fp32 moments", regression=10.0, timed=False),
            Figure("bfloat16", "loss with bf16 ones, off that", "%", at_most=0.005, timed=False),
            Figure("int8", "loss with 8-bit ones, off that", "%", at_most=0.005, timed=False),
        ),
        minutes=3,
        needs=(Need.CUDA,),
    ),
    Claim(
        name="checkpoint-gpu",
        says="A checkpoint of a 1B model in training on a GPU.",
        command="python -W ignore -m benchmarks.checkpoint --device cuda --rounds 3",
        figures=(
            Figure(
                "added_seconds", "added to training by a save", "s", at_most=0.06, regression=10.0
            ),  # about zero, either side of it
            Figure(
                "step_while_writing",
                "a step while it is written, of a normal one",
                "x",
                at_most=1.05,
            ),
            Figure(
                "added_of_dcp",
                "added, of what asynchronous DCP adds",
                "x",
                at_most=1.0,
                regression=10.0,
            ),
        ),
        minutes=3,
        needs=(Need.CUDA,),
    ),
    Claim(
        name="recovery-gpu",
        says="A worker on a GPU is killed; one that stands by goes on from shared memory.",
        command="python -m benchmarks.recovery --device cuda --only worker --times 10",
        figures=(
            Figure("worker_recovered", "kills that were recovered from", at_least=10, timed=False),
            Figure(
                "worker_median",
                "until the next committed step, median",
                "s",
                at_most=5.0,
                regression=0.2,
            ),
            Figure("worker_worst", "the worst", "s", at_most=8.0, regression=0.5),
            Figure("worker_steps_again", "committed steps made again", at_most=0, timed=False),
        ),
        minutes=2,
        needs=(Need.CUDA,),
    ),
    Claim(
        name="snapshots-gpu",
        says="A snapshot of every step of a small model on a GPU.",
        command="python -m benchmarks.recovery --device cuda --only snapshots",
        figures=(
            Figure(
                "step_ratio", "longer steps, 3.2 GB a snapshot", "x", at_most=1.6, regression=0.2
            ),
        ),
        minutes=2,
        needs=(Need.CUDA,),
    ),
    Claim(
        name="tune-gpu",
        says="From bad settings of llama3-1b on a GPU (micro-batch 1, everything recomputed, "
        "nothing compiled) `phalanx tune` comes near those tuned by hand.",
        command="python -m benchmarks.tune --job examples/llama3-1b.toml --bad train.compile=off "
        "--hand train.micro_batch=4 --minutes 4 --rounds 1",
        figures=(
            Figure("of_hand_tuned", "speed, of that tuned by hand", "x", at_least=0.9),
            Figure("of_original", "speed, of that before", "x", at_least=1.0),
            Figure("trials", "trials", at_most=40, timed=False),
            Figure("minutes", "minutes of trials", at_most=10.0),
        ),
        minutes=7,
        needs=(Need.CUDA,),
    ),
    Claim(
        name="recipes-gpu",
        says="Muon, the same bits on any number of replicas, and adapters beside PEFT.",
        command="python -m benchmarks.recipes_gpu",
        figures=(
            Figure("muon_step", "a step of llama3-1b with Muon, of AdamW's", "x", at_most=1.08),
            Figure(
                "strict_speed", "with virtual replicas, of the speed without", "x", at_least=0.9
            ),
            Figure("lora_speed", "adapters of llama3-3b, of PEFT's speed", "x", at_least=1.2),
            Figure("lora_tokens_per_second", "tokens with adapters", "/s"),
        ),
        minutes=5,
        needs=(Need.CUDA, Need.PEFT),
    ),
    Claim(
        name="gpu-tests",
        says="The tests that need a CUDA device, side by side.",
        command="python -m benchmarks.suite --gpu",
        figures=(Figure("passed", "tests that passed", at_least=100, timed=False), FAILED),
        minutes=5,
        needs=(Need.CUDA,),
    ),
    Claim(
        name="gpu-tests-alone",
        says="Those that measure time on it, one after the other.",
        command="python -m benchmarks.suite --gpu --alone",
        figures=(Figure("passed", "tests that passed", at_least=20, timed=False), FAILED),
        minutes=7,
        needs=(Need.CUDA,),
    ),
)
