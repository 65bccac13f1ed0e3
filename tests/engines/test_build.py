"""conf/engine to an engine: each kind on real ranks, and the combinations that are refused before anything starts."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from resilient.engines.base import Engine, EngineConfig
from resilient.engines.build import build_engine, check_engine_config
from resilient.engines.ddp import DDPEngine
from resilient.engines.fsdp2 import FSDP2Engine
from resilient.errors import ConfigError
from tests.engines import contract
from tests.engines.models import Setup, build_model, build_optimizer, build_scheduler
from tests.ranks import run_ranks

SETUP = Setup(accumulation=2, clip=1.0, groups=True)


def build(config: EngineConfig, clip: float | None = SETUP.clip) -> Engine:
    return build_engine(
        config,
        build_model(SETUP),
        make_optimizer=partial(build_optimizer, setup=SETUP),
        make_scheduler=partial(build_scheduler, setup=SETUP),  # type: ignore[arg-type]
        clip=clip,
        accumulation=SETUP.accumulation,
        micro_batch=4,
        device=torch.device("cpu"),
    )


def every_kind(rank: int, world: int) -> dict[str, float]:
    found = {}
    for name in ("ddp", "fsdp2", "deepspeed"):
        for precision in ("fp32", "bf16"):
            engine = build(EngineConfig(name, precision=precision, bucket_mb=0.004))  # type: ignore[arg-type]
            assert isinstance(engine, Engine)
            contract.train(engine, SETUP, range(2), rank)
            taps, _ = contract.window(engine, SETUP, 2, rank)
            assert taps.buckets > 1, f"{name} {precision}: {taps.buckets} buckets"
            found[f"{name} {precision}"] = contract.grad_norm(taps)
            engine.skip()
            if isinstance(engine, DDPEngine):
                assert isinstance(engine.model, DistributedDataParallel)
            if isinstance(engine, FSDP2Engine):
                assert all(isinstance(block, FSDPModule) for block in engine.module.blocks)  # type: ignore[union-attr]
            engine.close()
    return found


@pytest.mark.timeout(180)
def test_every_kind_trains_alike() -> None:
    """BR-45: the same model and data give the same norm whatever the engine (after two steps, so loosely in bf16)."""
    norms = run_ranks(every_kind, 2, timeout=170)
    assert norms[0] == pytest.approx(norms[1], rel=1e-12)
    for name, norm in norms[0].items():
        assert norm == pytest.approx(norms[0]["ddp fp32"], rel=1e-4 if name.endswith("fp32") else 5e-2), name


def test_without_other_processes() -> None:
    """ddp is the bare module then; fsdp2 needs a process group and says so."""
    assert not dist.is_initialized()
    engine = build(EngineConfig("ddp"))
    assert isinstance(engine, DDPEngine)
    assert engine.model is engine.module
    assert engine.clip == SETUP.clip
    unclipped = build(EngineConfig("ddp"), clip=0.0)
    assert isinstance(unclipped, DDPEngine)
    assert unclipped.clip is None
    with pytest.raises(ConfigError, match=r"engine\.name=fsdp2 needs a process group"):
        build(EngineConfig("fsdp2"))


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (EngineConfig("ddp", precision="fp16"), r"engine\.precision=fp16 with engine\.name=ddp"),
        (EngineConfig("fsdp2", precision="fp16"), r"engine\.precision=fp16 with engine\.name=fsdp2"),
        (EngineConfig("ddp", precision="int8"), r"engine\.precision=int8"),  # type: ignore[arg-type]
        (EngineConfig("fsdp2", zero_stage=2), r"engine\.zero_stage=2"),
        (EngineConfig("deepspeed", zero_stage=4), r"engine\.zero_stage=4"),
        (EngineConfig("ddp", deepspeed={"gradient_clipping": 1.0}), r"engine\.deepspeed"),
        (EngineConfig("ddp", bucket_mb=0.0), r"engine\.bucket_mb=0\.0"),
        (EngineConfig("horovod"), r"engine\.name=horovod"),  # type: ignore[arg-type]
    ],
)
def test_impossible_combinations_name_the_key(config: EngineConfig, key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        check_engine_config(config)
