"""Resolved dict -> checked JobConfig: the last look at a configuration before any process group exists."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from resilient import faults
from resilient.cli.argv import Runtime
from resilient.cli.convert import collect
from resilient.cli.errors import all_in_one
from resilient.engines.base import engine_problems
from resilient.errors import ConfigError
from resilient.train.config import JobConfig


def check_job(resolved: Mapping[str, Any], runtime: Runtime) -> JobConfig:
    """Convert strictly and look for combinations that cannot work. Raises one ConfigError with everything found."""
    problems: list[str] = []
    job = collect(JobConfig, {key: value for key, value in resolved.items() if key != "fault"}, "", problems)
    whole = not problems
    try:
        fault = faults.parse(resolved.get("fault"))
        if whole:
            faults.check_world(fault, runtime.world if runtime.launched else job.run.processes())
    except ConfigError as error:
        problems.append(str(error))
    if whole:
        problems += engine_problems(job.engine)
        _run(job, problems)
    if problems:
        raise all_in_one(problems)
    return job


def _run(job: JobConfig, problems: list[str]) -> None:
    run = job.run
    at_least_one = {
        "run.steps": run.steps,
        "run.nproc": run.processes(),
        "run.eval_batches": run.eval_batches,
        "run.snapshot.keep": run.snapshot.keep,
        "run.checkpoint.keep": run.checkpoint.keep,
    }
    not_negative = {
        "run.eval_every": run.eval_every,
        "run.sample_tokens": run.sample_tokens,
        "run.log_every": run.log_every,
        "run.guard.nan_probes": run.guard.nan_probes,
        "run.guard.confirmations": run.guard.confirmations,
        "run.guard.digests_every": run.guard.digests_every,
        "run.guard.link_probes": run.guard.link_probes,
        "run.threads": run.threads,
        "run.snapshot.every": run.snapshot.every,
        "run.checkpoint.every": run.checkpoint.every,
        "run.checkpoint.keep_every": run.checkpoint.keep_every,
    }
    problems += [f"{key}={value}: must be at least 1" for key, value in at_least_one.items() if value < 1]
    problems += [f"{key}={value}: must not be negative" for key, value in not_negative.items() if value < 0]
    if not run.guard.exchange_timeout_s > 0:
        problems.append(f"run.guard.exchange_timeout_s={run.guard.exchange_timeout_s}: must be positive")
    if not 1 <= run.checkpoint.shortest <= run.checkpoint.longest <= 1000:
        problems.append(
            f"run.checkpoint.shortest={run.checkpoint.shortest}, longest={run.checkpoint.longest}: "
            "must be 1 <= shortest <= longest <= 1000"
        )
    if run.snapshot.budget_mb is not None and not run.snapshot.budget_mb > 0:
        problems.append(f"run.snapshot.budget_mb={run.snapshot.budget_mb}: must be positive, or null for no limit")
    if run.guard.grace_s is not None and not run.guard.grace_s > 0:
        problems.append(f"run.guard.grace_s={run.guard.grace_s}: must be positive, or null when it is not known")
    if not run.guard.link_probe_s > 0:
        problems.append(f"run.guard.link_probe_s={run.guard.link_probe_s}: must be positive")
