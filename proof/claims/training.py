"""Training, checkpoints and data on CPU."""

from __future__ import annotations

from proof.claim import Claim, Figure, Need

QUIET = (Need.QUIET,)

TRAINING = (
    Claim(
        name="first-step",
        says="Somebody who types `phalanx train` sees the first step of four ranks within seconds.",
        command="python -m benchmarks.first_step --repetitions 5 --clocked 0",
        figures=(Figure("median_seconds", "from the command to the first step", "s", at_most=6.0),),
        minutes=1,
        needs=QUIET,
        quick=True,
    ),
    Claim(
        name="parity",
        says="Every mesh trains as one process does: losses and gradient norms of ten steps.",
        command="python -m benchmarks.parity",
        figures=(
            Figure("meshes", "meshes compared", at_least=10, timed=False),
            Figure("loss_difference", "greatest difference of a loss", at_most=1e-4, timed=False),
            Figure(
                "norm_difference",
                "greatest difference of a gradient norm, relative",
                at_most=1e-3,
                timed=False,
            ),
        ),
        minutes=2,  # with every change: tests/parallel/test_parity.py, on more meshes
    ),
    Claim(
        name="virtual-replicas",
        says="With virtual replicas the demo's losses are the same to the bit on one, two and four "
        "replicas, and its steps hardly slower.",
        command="python -m benchmarks.virtual_replicas",
        figures=(
            Figure("identical", "losses on 1, 2 and 4 replicas the same", at_least=1, timed=False),
            Figure("speed_demo", "speed of a step against the ordinary, demo", "x", at_least=0.8),
            Figure("speed_zero0", "four replicas, nothing sharded", "x", at_least=0.8),
            Figure("speed_zero2", "four replicas, gradients sharded", "x", at_least=0.8),
            Figure("speed_zero3", "four replicas, weights sharded", "x", at_least=0.8),
        ),
        minutes=3,
        needs=QUIET,
    ),
    Claim(
        name="muon",
        says="On four ranks, each of which orthogonalises a part of the matrices, a step with Muon "
        "of the demo's model costs little more than one with AdamW.",
        command="python -m benchmarks.muon",
        figures=(
            Figure("step_demo", "a step with Muon, of AdamW's, demo", "x", at_most=1.25),
            Figure("step_zero0", "four replicas, nothing sharded", "x", at_most=1.25),
            Figure("step_zero2", "four replicas, gradients sharded", "x", at_most=1.25),
            Figure("step_zero3", "four replicas, weights sharded", "x", at_most=1.25),
            Figure("processor_demo", "processor time of a step, of AdamW's, demo", "x"),
            Figure("processor_zero0", "processor time, nothing sharded", "x"),
            Figure("processor_zero2", "processor time, gradients sharded", "x"),
            Figure("processor_zero3", "processor time, weights sharded", "x"),
        ),
        minutes=2,
        needs=QUIET,
    ),
    Claim(
        name="plan-cpu",
        says="Calibrated on two cores, the planner predicts the demo's steps on other meshes.",
        command="python -m benchmarks.plan_cpu --rounds 15",
        figures=(
            Figure("meshes", "meshes predicted", at_least=8, timed=False),
            Figure("within", "meshes predicted within 15 % of the measured step", at_least=8),
            Figure("worst_error", "greatest error of a predicted step", "%"),
            Figure("mean_error", "mean error", "%"),
        ),
        minutes=4,
        needs=QUIET,
    ),
    Claim(
        name="what-if",
        says="Twelve changes of a job that runs are asked about, then carried out: the measured "
        "step lies in the 80 % interval of the answer, and no step is lost.",
        command="python -m benchmarks.what_if",
        figures=(
            Figure("changes", "changes carried out", at_least=12, timed=False),
            Figure("inside", "measured steps inside the 80 % interval", at_least=9),
            Figure("steps_wrong", "steps lost or made twice", at_most=0, timed=False),
            Figure("answer", "the slowest answer about a 16,384-GPU job", "s", at_most=1.0),
            Figure("first_answer", "the first, with the start of the planner's process", "s"),
        ),
        minutes=10,
        needs=QUIET,
    ),
    Claim(
        name="tune",
        says="From bad settings of the demo's job `phalanx tune` comes near those tuned by hand.",
        command="python -m benchmarks.tune",
        figures=(
            Figure("of_hand_tuned", "speed, of that tuned by hand", "x", at_least=0.9),
            Figure("of_original", "speed, of that before", "x", at_least=1.0),
            Figure("trials", "trials", at_most=40, timed=False),
            Figure("minutes", "minutes of trials", at_most=10.0),
        ),
        minutes=12,
        needs=QUIET,
    ),
    Claim(
        name="overlap",
        says="Communication hides behind compute: DDP's buckets and FSDP's prefetched gathers.",
        command="python -m benchmarks.overlap --rounds 5",
        figures=(
            Figure("ddp_hidden", "share hidden, DDP in buckets of 4 MB", "%", at_least=0.4),
            Figure("fsdp_hidden", "share hidden, FSDP with prefetch", "%", at_least=0.5),
            Figure("ddp_one_bucket_hidden", "the same with one bucket, to compare", "%"),
            Figure("fsdp_no_prefetch_hidden", "the same without prefetch, to compare", "%"),
        ),
        minutes=2,
        needs=QUIET,
    ),
    Claim(
        name="checkpoint",
        says="A checkpoint hardly holds training up, and is written and read at the disk's speed.",
        command="python -m benchmarks.checkpoint --rounds 6",
        figures=(
            *(
                # About a millisecond, which a turn of the scheduler doubles.
                Figure(name, says, unit, at_most=most, regression=4.0)
                for name, says, unit, most in (
                    ("stall_seconds", "training held up by a save of 1.6 GB", "s", 0.02),
                    ("stall_of_dcp_sync", "of synchronous DCP's stall", "x", 0.125),
                    ("stall_of_dcp_async", "of asynchronous DCP's stall", "x", 0.34),
                    ("stall_of_dcp_reused", "of DCP's with a reused stager", "x", 0.7),
                )
            ),
            # Two cores that train without pause have none to spare for the copy.
            Figure(
                "taken_of_dcp_sync",
                "longer step, of synchronous DCP's",
                "x",
                at_most=0.2,
                regression=0.5,
            ),
            Figure(
                "taken_of_dcp_reused",
                "longer step, of a reused stager's",
                "x",
                at_most=0.7,
                regression=0.5,
            ),
            Figure("durable_of_raw", "speed until durable, of the bare disk's", "x", at_least=0.85),
            Figure(
                "durable_of_dcp", "speed until durable, of DCP's", "x", at_least=1.2, regression=0.3
            ),
            Figure(
                "load_of_raw",
                "cold load with every byte proved, of a bare read",
                "x",
                at_least=0.85,
                regression=0.2,
            ),
        ),
        minutes=3,
        needs=QUIET,
    ),
    Claim(
        name="checkpoint-scale",
        says="Metadata of a checkpoint stays small at 98,304 ranks.",
        command="python -m benchmarks.checkpoint_scale",
        figures=(
            Figure("seconds_16k", "all metadata of 16,384 ranks", "s", at_most=5.0),
            Figure("seconds_98k", "all metadata of 98,304 ranks, 1T parameters", "s", at_most=30.0),
        ),
        minutes=1,
        needs=QUIET,
    ),
    Claim(
        name="checkpoint-planner",
        says="Who writes what is derived by every rank, not planned by one for all.",
        command="python -m benchmarks.checkpoint_planner --ranks 16 32 64",
        figures=(
            Figure("dcp_seconds", "DCP's planning of 64 ranks and 2,000 tensors, each save", "s"),
            Figure(
                "derived_seconds",
                "derived for 16,384 ranks, once a run",
                "s",
                at_most=0.5,
                regression=0.5,
            ),
        ),
        minutes=0.5,
        needs=QUIET,
    ),
    Claim(
        name="checkpoint-size",
        says="Neither incremental nor compressed checkpoints pay.",
        command="python -m benchmarks.checkpoint_size",
        figures=(
            Figure(
                "unchanged",
                "64 KiB chunks that one step leaves as they were, at most",
                "%",
                at_most=0.05,
                timed=False,
            ),
            Figure(
                "saved",
                "what zstd saves of masters and moments, at most",
                "%",
                at_most=0.2,
                timed=False,
            ),
        ),
        minutes=0.5,
    ),
    Claim(
        name="replica-channel",
        says="Replicas between keepers, plain and sealed, over loopback.",
        command="python -m benchmarks.replica_channel",
        figures=(
            Figure("plain", "plain", "GB/s", at_least=0.5, regression=0.4),
            Figure("encrypted", "sealed", "GB/s", at_least=0.25, regression=0.4),
            Figure(
                "encrypted_handshake_ms", "handshake, sealed", "ms", at_most=5.0, regression=1.0
            ),
        ),
        minutes=0.5,
        needs=QUIET,
    ),
    Claim(
        name="loader",
        says="Samples are read nearly as fast as memory is copied, and a corpus of 15 trillion "
        "tokens opens at once.",
        command="python -m benchmarks.data --rounds 7",
        figures=(
            Figure(
                "million_tokens_per_second",
                "million tokens read, shuffled",
                "/s",
                at_least=300,
                regression=0.3,
            ),
            Figure("of_memmap", "of a bare array with a stored permutation", "x", at_least=0.5),
            Figure(
                "open_ms",
                "opening 15e12 tokens until the first batch",
                "ms",
                at_most=100,
                regression=0.3,
            ),
            Figure("open_megabytes", "memory of that process", "MB", at_most=200),
            Figure("cursor_bytes", "bytes of the cursor", at_most=1024, timed=False),
        ),
        minutes=1.5,
        needs=QUIET,
    ),
    Claim(
        name="object-store",
        says="50 ms of latency a request do not slow the reading of a corpus in an object store.",
        command="python -m benchmarks.data_store --rounds 3",
        figures=(Figure("with_latency", "of the rate without latency", "%", at_least=0.8),),
        minutes=3,
        needs=(Need.QUIET, Need.S3),
    ),
    Claim(
        name="tokenizing",
        says="Tokenising keeps up with the library's own batch encode, files and shards included.",
        command="python -m benchmarks.tokenizing",
        figures=(
            Figure("ratio_1_core", "of the library's rate on one core", "x", at_least=0.9),
            Figure("ratio_2_cores", "of the library's rate on two", "x", at_least=0.9),
        ),
        minutes=4,
        needs=QUIET,
    ),
    Claim(
        name="deduplication",
        says="`phalanx data prepare` finds near-duplicates, fast and in little memory.",
        command="python -m benchmarks.data_prepare",
        figures=(
            Figure("recall", "planted near-duplicates found", "%", at_least=0.95, timed=False),
            Figure("precision", "of what is removed, rightly", "%", at_least=0.99, timed=False),
            Figure("spacy_ratio", "of datatrove's documents a second of a core", "x", at_least=1.0),
            Figure("split_ratio", "the same, had it a faster tokenizer", "x", at_least=1.0),
            Figure(
                "memory_gib", "peak memory for 10 M documents", "GiB", at_most=8.0, regression=0.3
            ),
        ),
        minutes=12,
        needs=(*QUIET, Need.DATATROVE),
    ),
)
