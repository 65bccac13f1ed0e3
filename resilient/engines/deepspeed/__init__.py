"""DeepSpeed ZeRO 0-3 behind the Engine protocol. Written against deepspeed 0.19.8.

setup: building an engine from configuration. wrapper: the Engine itself. stages, zero: where each of DeepSpeed's
optimizers keeps its gradients, masters, clip value and loss scale. support: which engines can be guarded.
state: capture and restore on the live tensors.
"""

from resilient.engines.deepspeed.setup import build
from resilient.engines.deepspeed.wrapper import DeepSpeedEngine

__all__ = ["DeepSpeedEngine", "build"]
