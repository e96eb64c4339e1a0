"""What jobs find of their agent's environment: what is named here or by the site, and no more.

An agent holds tokens and whatever its service was started with. Jobs are other people's.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

# Names, or patterns of names.
PASSED = (
    *("PATH", "LANG", "LANGUAGE", "LC_*", "TZ", "HOME", "USER", "LOGNAME", "SHELL", "TMPDIR"),
    *("LD_LIBRARY_PATH", "LD_PRELOAD", "VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV"),
    *("PYTHONPATH", "PYTHONHOME", "PYTHONHASHSEED", "PYTHONUNBUFFERED", "PYTHONWARNINGS"),
    *("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX", "PYTHONFAULTHANDLER", "MALLOC_*"),
    *("CUDA_*", "CUBLAS_*", "CUDNN_*", "NVIDIA_*", "NCCL_*", "UCX_*", "UCC_*", "FI_*", "RDMAV_*"),
    *("IBV_*", "HSA_*", "ROCR_*", "HIP_*", "RCCL_*", "GLOO_*", "TP_SOCKET_IFNAME"),
    *("OMP_*", "MKL_*", "KMP_*", "OPENBLAS_*", "NUMEXPR_*", "TOKENIZERS_PARALLELISM"),
    *("TORCH_*", "PYTORCH_*", "TORCHINDUCTOR_*", "TORCHDYNAMO_*", "TRITON_*", "KINETO_*"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "HF_HOME", "HF_HUB_OFFLINE"),
    *("SLURM_*", "SLURMD_NODENAME", "RAY_ADDRESS", "KUBERNETES_*", "MODULEPATH", "LOADEDMODULES"),
    *("HWLOC_*", "PHALANX_RUN", "PHALANX_IMAGE", "PHALANX_DOMAIN", "PHALANX_ARRAY_*"),
)
# Never, whatever a site's pattern says: they let whoever has them act for a node or a person.
KEPT = ("PHALANX_TOKEN", "PHALANX_TOKEN_*", "PHALANX_JOIN*", "SLURM_JWT", "NOTIFY_SOCKET")


def passed_on(environment: Mapping[str, str], names: tuple[str, ...] = PASSED) -> dict[str, str]:
    """What of the agent's environment its jobs, keepers and shells find."""
    return {
        name: value
        for name, value in environment.items()
        if _named(name, names) and not _named(name, KEPT)
    }


def _named(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
