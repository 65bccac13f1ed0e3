"""resilient: the stability coordinator for DeepSpeed and FSDP training.

Importing this package stays cheap on purpose: the names below are loaded on first use, and neither
deepspeed nor hydra is imported until an engine or a command asks for it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from resilient.integrations.guard import Guard as Guard

__version__ = "0.1.0"
__all__ = ["Guard", "__version__"]

_LAZY = {"Guard": "resilient.integrations.guard"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'resilient' has no attribute {name!r}")
