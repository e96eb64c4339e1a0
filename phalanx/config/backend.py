"""Settings of the engine that gives a job its nodes: Slurm, Ray, Kubernetes.

Ways that do not use an engine ignore its settings, so that one file runs everywhere.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from phalanx.config.section import Count, Natural, NonNegative, Section

NodeGpus = Annotated[int, Meta(ge=0, le=63)]
Port = Annotated[int, Meta(ge=0, le=65535)]
SignalSeconds = Annotated[int, Meta(ge=10, le=65535)]


class Slurm(Section, frozen=True, kw_only=True):
    """What a site's Slurm wants to know (`phalanx submit --backend slurm`)."""

    account: str = ""
    """Account that is charged; "": the user's default."""
    partition: str = ""
    """Partition, or several with commas; "": the default one."""
    qos: str = ""
    """Quality of service; "": the default one."""
    reservation: str = ""
    """Reservation to run in."""
    constraint: str = ""
    """Features that nodes must have, in Slurm's own words."""
    nodelist: str = ""
    """Nodes that must be part of the allocation."""
    exclude: str = ""
    """Nodes that must not; those that Phalanx quarantined are added."""
    gpu_type: str = ""
    """Type of GPU in the site's gres; "": any."""
    gres: bool = False
    """Ask with --gres instead of --gpus-per-node."""
    requeue: bool = True
    """After its time limit, preemption or a lost batch host the job goes back to the queue."""
    signal_seconds: SignalSeconds = 120
    """Warning before the time limit, for a snapshot and its flush."""
    switches: Annotated[int, Meta(ge=-1, le=10_000)] = 0
    """Most leaf switches; 0: as few as the gang needs by the site's topology; -1: not asked."""
    switches_minutes: Natural = 10
    """How long Slurm may wait for nodes below so few switches."""
    segment: Natural = 0
    """Nodes of a block that stay together (--segment, Slurm 23.11 or newer); 0: not asked."""
    dependency: str = ""
    """Jobs to wait for, as Slurm writes it, e.g. "afterok:123"."""
    array: Natural = 0
    """Members of a job array; 0: one job."""
    array_width: Natural = 0
    """Members that run at a time; 0: all."""
    container: Literal["none", "pyxis", "apptainer"] = "none"
    """What starts backend.image: the Pyxis plugin (Enroot), or Apptainer."""
    image_folder: str = ""
    """Node-local folder that each node copies the image to first, verified; "": not copied."""
    ray: bool = False
    """Start a Ray cluster inside the allocation as well; RAY_ADDRESS tells the job where."""
    setup: tuple[str, ...] = ()
    """Lines of shell before anything starts, e.g. "module load cuda"."""
    options: tuple[str, ...] = ()
    """More lines for #SBATCH, e.g. "--licenses=scratch"."""


class Ray(Section, frozen=True, kw_only=True):
    """An existing Ray cluster (`phalanx submit --backend ray`)."""

    address: str = "auto"
    """Address of its head; "auto": as RAY_ADDRESS or this machine says."""
    cpus_per_node: Natural = 0
    """CPUs that each agent's actor reserves; 0: all of a node."""
    runtime_env: str = ""
    """JSON file with Ray's runtime_env (pip, env_vars, working_dir, …) for agents and the job."""
    leaf_resource: str = "leaf:"
    """Beginning of the custom resource that names a node's leaf switch, e.g. "leaf:7"."""


class Kubernetes(Section, frozen=True, kw_only=True):
    """A Kubernetes cluster (`phalanx submit --backend kubernetes`, `phalanx k8s manifests`)."""

    kind: Literal["jobset", "pytorchjob", "volcano", "job", "pods"] = "jobset"
    """What carries the pods; "job": Indexed Jobs, "pods": bare pods, both with a headless service
    and nothing installed."""
    namespace: str = "default"
    """Namespace of everything that is made."""
    queue: str = ""
    """Kueue's LocalQueue; "": not queued."""
    priority_class: str = ""
    """PriorityClass of the pods."""
    service_account: str = "phalanx"
    """Account that the controller's pod runs under."""
    pull_secrets: tuple[str, ...] = ()
    """Secrets for pulling the image."""
    gpu_resource: str = "nvidia.com/gpu"
    """Name of a GPU to the device plugin."""
    gpu_product: str = ""
    """GPU-feature label nvidia.com/gpu.product, e.g. "NVIDIA-H100-80GB-HBM3"; "": any."""
    topology: str = "cloud.provider.com/topology-block"
    """Node label of the level that one gang should stay within (Kueue's topology)."""
    topology_required: bool = False
    """The gang must stay within one such block, or only prefers to."""
    host_network: bool = False
    """Pods use the node's network, for RDMA without a second interface."""
    rdma_resource: str = ""
    """Name of an RDMA device to its plugin, e.g. "rdma/hca_shared_devices_a"."""
    rdma_devices: Natural = 1
    """RDMA devices of a pod."""
    cpus: Natural = 0
    """CPUs of a pod; 0: eight a rank."""
    memory_gb: NonNegative = 0.0
    """Memory of a pod, in 10^9 bytes, snapshots included; 0: as predicted for backend.cluster,
    else 32 a rank and at least 64."""
    shm_gb: NonNegative = 0.0
    """Size of /dev/shm, part of the memory; 0: two a rank and at least 16."""
    runs_claim: str = ""
    """PersistentVolumeClaim with the runs folder; all pods mount it."""
    data_claim: str = ""
    """PersistentVolumeClaim with the corpus, mounted read-only at /data."""
    stage: str = ""
    """Command of an init container that copies data to node-local disk first."""
    tolerations: tuple[str, ...] = ("nvidia.com/gpu",)
    """Keys of taints that the pods tolerate."""
    keep_hours: NonNegative = 24.0
    """After its end a job's objects are deleted so much later (bare pods stay)."""
    grace_seconds: SignalSeconds = 120
    """Time between the wish to end a pod and its end, for a snapshot and its flush."""
    user: Count = 1000
    """User that containers run as."""


class Backend(Section, frozen=True, kw_only=True):
    """Where the nodes come from, whatever the engine."""

    gpus_per_node: NodeGpus = 0
    """GPUs that the job takes of a node; 0: up to 8, so that all nodes take equally many."""
    device: Literal["cuda", "cpu"] = "cuda"
    """What a program computes on; a job file says train.device."""
    spares: Natural = 0
    """Nodes in the same allocation that stand by for failures."""
    cluster: str = ""
    """Cluster of the catalogue, e.g. "h100-512", whose prediction gives time and memory."""
    hours: NonNegative = 0.0
    """Length of an allocation; 0: as predicted for backend.cluster, or the engine's default."""
    image: str = ""
    """Container image by digest: "registry/name@sha256:" and 64 hexadecimal digits, or the file of
    one and its checksum, "/images/phalanx.sif@sha256:…" (Slurm)."""
    mounts: tuple[str, ...] = ()
    """Folders that the container sees: "/path" or "/path:/inside"."""
    controller: Literal["job", "here", "server"] = "job"
    """The controller runs inside the allocation, in the process that submits (Slurm: a login node,
    so that any node may be lost), or is the server of --server."""
    standby: bool = True
    """Agents have torch loaded and workers ready, or start nothing before the job does."""
    port: Port = 0
    """Port of a controller inside the allocation; 0: from the engine's number of the job."""
    tls: bool = True
    """A controller inside the allocation makes itself a certificate, and agents trust that one."""
    network_hints: bool = False
    """Set NCCL_* and UCX_* variables for InfiniBand; sites usually do."""
    environment: dict[str, str] = {}
    """Variables for every process of the job."""
    slurm: Slurm = Slurm()
    ray: Ray = Ray()
    kubernetes: Kubernetes = Kubernetes()
