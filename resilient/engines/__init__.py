"""Training engines behind one protocol: DeepSpeed, FSDP2 and DDP, each as an adapter around the user's own objects.

Import the one you need: `resilient.engines.ddp`, `.fsdp2`, `.deepspeed`, or `.build` for the reference job's way.
"""

from resilient.engines.base import Counters, Engine, EngineConfig, EngineState, Taps

__all__ = ["Counters", "Engine", "EngineConfig", "EngineState", "Taps"]
