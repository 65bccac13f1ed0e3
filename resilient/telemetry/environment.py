"""env.json: what this start ran on, so that it can be done again (T1). Never a credential."""

from __future__ import annotations

import os
import platform
import re
import socket
import subprocess
import sys
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = ("resilient-train", "torch", "deepspeed", "numpy", "hydra-core", "omegaconf")
_VARIABLES = re.compile(
    r"^(CUDA|NCCL|GLOO|TORCH|PYTORCH|OMP|MKL|DS|DEEPSPEED|SLURM|RESILIENT|HYDRA|CUBLAS|NVIDIA|HIP|ROCR)_"
    r"|^(RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|NODE_RANK|GROUP_RANK|MASTER_ADDR|MASTER_PORT|PYTHONHASHSEED)$"
)
_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)
_URL_LOGIN = re.compile(r"(\w+://)[^/@\s]+@")


def describe_environment() -> dict[str, Any]:
    """Versions, platform, git state, launch arguments, host, device and selected variables of this process.

    Imports neither torch nor deepspeed: versions come from package metadata, the device from torch if it is loaded."""
    return {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "packages": {name: found for name in _PACKAGES if (found := _version(name))},
        "platform": platform.platform(),
        "hostname": socket.gethostname(),
        "pid": os.getpid(),
        "cpus": os.cpu_count(),
        "device": _device(),
        "git": _git_state(),
        "argv": [_argument(a) for a in sys.argv],
        "cwd": os.getcwd(),
        "variables": selected_variables(dict(os.environ)),
    }


def selected_variables(environ: dict[str, str]) -> dict[str, str]:
    """Variables that change how a job runs. Names that look like credentials are dropped, logins in URLs are masked."""
    return {
        name: _URL_LOGIN.sub(r"\1***@", value)
        for name, value in sorted(environ.items())
        if _VARIABLES.search(name) and not _SECRET.search(name)
    }


def _argument(text: str) -> str:
    name, sign, _ = text.partition("=")
    return f"{name}=***" if sign and _SECRET.search(name) else _URL_LOGIN.sub(r"\1***@", text)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _device() -> str:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    return platform.processor() or platform.machine() or "cpu"


def _git_state() -> dict[str, Any]:
    """Commit and dirty flag of the working directory's checkout and of this package's, where they are in one."""
    found: dict[str, Any] = {}
    for name, folder in (("package", Path(__file__).parent), ("cwd", Path.cwd())):
        commit = _git(folder, "rev-parse", "HEAD")
        if commit:
            changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
            found[name] = {"commit": commit, "dirty": bool(changed) if changed is not None else None}
    return found


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
