"""One folder per run: its identity, its files, and who may write them (DESIGN 8, BR-63).

    <root>/<run_id>/  config.yaml  env.json  generation.json  .lock  journal.jsonl  steps.jsonl
                      incidents/<step>-<cause>/  checkpoints/  verdict.json  summary.json

The id is the identity: starting it again continues it, in the same place, with the configuration it began with.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import socket
import time
import warnings
from pathlib import Path
from typing import Any, Literal

import yaml

from resilient.errors import ConfigError, ResilientError
from resilient.telemetry.environment import describe_environment
from resilient.telemetry.files import TelemetryError, flatten, plain, read_json, write_atomic, write_json

ABSENT = "(absent)"
"""Stands for a missing key in `RunDirectory.differences`."""

START_KEYS = (
    "run.root",
    "run.id",
    "run.resume",
    "run.on_config_change",
    "run.on_no_valid_checkpoint",
    "run.checkpoint.elastic",
    "run.checkpoint.allow_missing",
)
"""How to start, not what to train: today's value counts, and a change is no difference."""

_TODAYS = (*START_KEYS, "run.nproc")  # in one run; two runs with different numbers of ranks do differ

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._,=+@-]{0,199}\Z")
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)

_held: set[int] = set()  # lock descriptors of this process


def _drop_locks_in_child() -> None:
    """A forked data worker must not keep the run locked after its parent was killed."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_drop_locks_in_child)


class StaleGeneration(ResilientError):
    """A newer start of the same run exists: this process must not write any more."""


class RunDirectory:
    """A run's folder. Made by `open` on rank 0 and by `attach` on all others.

    config: the configuration to train with: the one the run began with, except START_KEYS and `run.nproc`.
    differences: (key, original, now) for every key in which the configuration given to `open` differs from it.
    generation: 0 for the first start of this id, one more for each further one.
    first_world: ranks of the first start of this id, where it was told.
    writable: True on rank 0 only.
    """

    def __init__(
        self,
        path: Path,
        config: dict[str, Any],
        generation: int,
        differences: list[tuple[str, Any, Any]],
        lock: int | None,
        writable: bool,
        first_world: int | None = None,
    ) -> None:
        self.path = path
        self.run_id = path.name
        self.config = config
        self.generation = generation
        self.differences = differences
        self.writable = writable
        self.first_world = first_world
        self._lock = lock

    @classmethod
    def open(
        cls,
        root: str | os.PathLike[str],
        run_id: str,
        config: dict[str, Any],
        *,
        resume: Literal["auto", "never", "must"] = "auto",
        on_config_change: Literal["keep", "refuse"] = "keep",
        world: int | None = None,
        lock_wait_s: float = 2.0,
    ) -> RunDirectory:
        """Create the run, or continue it. Call on rank 0 only, before any process group is needed.

        world: ranks of this start.
        lock_wait_s: how long to wait for a predecessor that is still dying to let go of the run.
        Raises ConfigError: bad id; the id is in use by a live process; `must` on a fresh id; `never` on an existing
        one; `refuse` and the configuration differs. TelemetryError: the folder cannot be written."""
        if not _NAME.match(run_id):
            raise ConfigError(f"run.id: {run_id!r} is not a plain name (letters, digits and . _ , = + @ -)")
        path = Path(root).expanduser().absolute() / run_id
        now = plain(config)
        if resume == "must" and not (path / "generation.json").exists():
            raise ConfigError(f"run.resume=must: there is no run {run_id!r} in {path.parent}")
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"run.root: cannot create {path}: {error.strerror}") from error
        lock = _take_lock(path, lock_wait_s)
        try:
            return cls._open_locked(path, now, resume, on_config_change, world, lock)
        except BaseException:
            _release(lock)
            raise

    @classmethod
    def _open_locked(
        cls, path: Path, now: dict[str, Any], resume: str, on_config_change: str, world: int | None, lock: int | None
    ) -> RunDirectory:
        previous = read_json(path / "generation.json")
        if previous is None:
            if (path / "steps.jsonl").exists() or any((path / "checkpoints").glob("*")):
                raise ConfigError(f"run.id: {path} holds traces of training but no generation.json; choose another id")
            generation, config, differences = 0, now, []
            write_atomic(path / "config.yaml", yaml.safe_dump(now, sort_keys=False, allow_unicode=True, width=120))
        else:
            if resume == "never":
                raise ConfigError(f"run.resume=never: run {path.name!r} exists in {path.parent}; choose another run.id")
            original = read_config(path)
            differences = config_differences(original, now)
            if differences and on_config_change == "refuse":
                lines = "; ".join(f"{key}: {was!r} -> {new!r}" for key, was, new in differences)
                raise ConfigError(f"run.on_config_change=refuse: run {path.name!r} began with other values: {lines}")
            generation = int(previous["generation"]) + 1
            config = _with_todays(original, now)
            world = previous.get("first_world")
        for name in ("incidents", "checkpoints"):
            (path / name).mkdir(exist_ok=True)
        _write_environment(path, generation)
        for name in ("verdict", "summary"):  # what an earlier start left must not be read as this one's
            if (path / f"{name}.json").exists():
                os.replace(path / f"{name}.json", path / f"{name}.{generation - 1}.json")
        # The last write makes the start count: whoever holds a lower number is refused from here on.
        write_json(
            path / "generation.json",
            {
                "generation": generation,
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "time": time.time(),
                "first_world": world,
            },
        )
        return cls(path, config, generation, differences, lock, writable=True, first_world=world)

    @classmethod
    def attach(cls, path: str | os.PathLike[str]) -> RunDirectory:
        """The run as the other ranks see it, after rank 0 opened it: same places, same generation, never written.

        Raises ConfigError if there is no run at `path`."""
        found = Path(path).expanduser().absolute()
        current = read_json(found / "generation.json")
        if current is None:
            raise ConfigError(f"{found} is not a run directory (no generation.json)")
        config, generation, world = read_config(found), int(current["generation"]), current.get("first_world")
        return cls(found, config, generation, [], None, writable=False, first_world=world)

    @property
    def resumed(self) -> bool:
        """True if this is not the first start of this id."""
        return self.generation > 0

    @property
    def journal(self) -> Path:
        return self.path / "journal.jsonl"

    @property
    def steps(self) -> Path:
        return self.path / "steps.jsonl"

    @property
    def incidents(self) -> Path:
        return self.path / "incidents"

    def about(self) -> dict[str, Any]:
        """Digest of the configuration, and commit of the source as env.json has it: for the manifests of checkpoints."""
        text = json.dumps(self.config, sort_keys=True, default=str).encode()
        environment = read_json(self.path / "env.json") or {}
        return {"config_digest": hashlib.blake2b(text, digest_size=8).hexdigest(), "git": environment.get("git")}

    def token(self) -> str:
        """A secret of this run, made when it is first asked for; readable for its owner only. Rank 0. Raises OSError."""
        path = self.path / ".token"
        with contextlib.suppress(FileExistsError):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "w") as file:
                file.write(secrets.token_hex(16))
        return path.read_text()

    def assert_current_generation(self) -> None:
        """Raise StaleGeneration if this run was started again since. Call before committing a checkpoint or verdict."""
        current = read_json(self.path / "generation.json")
        if current is None:
            raise TelemetryError(f"cannot read {self.path / 'generation.json'}")
        if int(current["generation"]) != self.generation:
            raise StaleGeneration(
                f"run {self.run_id!r}: this process is generation {self.generation}, but generation "
                f"{current['generation']} was started by process {current.get('pid')} on {current.get('host')}"
            )

    def write_summary(self, summary: dict[str, Any]) -> None:
        """summary.json. Rank 0 only, and refused once a newer generation exists."""
        if not self.writable:
            raise TelemetryError("summary.json: only rank 0 writes the run directory")
        self.assert_current_generation()
        write_json(self.path / "summary.json", summary)

    def close(self) -> None:
        """Let go of the run, so that it can be started again. Idempotent; a dying process does the same."""
        _release(self._lock)
        self._lock = None
        self.writable = False

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def read_config(path: Path) -> dict[str, Any]:
    """The resolved configuration a run began with. Raises ConfigError if it cannot be read."""
    try:
        data = yaml.safe_load((path / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{path / 'config.yaml'} cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path / 'config.yaml'} holds no configuration")
    return data


def config_differences(original: dict[str, Any], now: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """(dotted key, original, now) of every leaf that differs, those left out of which today's value counts, in the order of
    the original."""
    was, new = flatten(plain(original)), flatten(plain(now))
    keys = [key for key in dict.fromkeys([*was, *new]) if key not in _TODAYS]
    pairs = [(key, was.get(key, ABSENT), new.get(key, ABSENT)) for key in keys]
    return [(key, a, b) for key, a, b in pairs if a != b and not (a != a and b != b)]  # NaN equals NaN here


def is_live(path: Path) -> bool:
    """True if some process has this run open now."""
    try:
        descriptor = os.open(path / ".lock", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def _with_todays(original: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """`original`, with today's values of the keys that both of them could have."""
    for key in _TODAYS:
        original = _put(original, now, key.split("."))
    return original


def _put(original: Any, now: Any, path: list[str]) -> Any:
    name, *rest = path
    if not isinstance(original, dict) or not isinstance(now, dict) or name not in now:
        return original
    return {**original, name: _put(original.get(name), now[name], rest) if rest else now[name]}


def _write_environment(path: Path, generation: int) -> None:
    """env.json describes the newest start; of earlier ones it keeps what was different."""
    current = {"generation": generation, **plain(describe_environment())}
    earlier: list[dict[str, Any]] = []
    previous = read_json(path / "env.json")
    if previous is not None:
        older = previous.pop("earlier", [])
        changed = {key: value for key, value in previous.items() if current.get(key) != value}
        earlier = [*older, changed]
    write_json(path / "env.json", {**current, "earlier": earlier})


def _take_lock(path: Path, wait_s: float) -> int | None:
    """Hold `.lock` for as long as this process lives. Its content is for the message; the kernel keeps the lock."""
    try:
        descriptor = os.open(path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ConfigError(f"run.root: cannot write in {path}: {error.strerror}") from error
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() >= deadline:
                holder = _holder(descriptor)
                os.close(descriptor)
                raise ConfigError(
                    f"run.id: run {path.name!r} in {path.parent} is already running ({holder}); "
                    "wait for it, stop it, or choose another run.id"
                ) from None
            time.sleep(0.05)
        except OSError as error:
            os.close(descriptor)
            if error.errno not in _NO_LOCKS:
                raise ConfigError(f"run.root: cannot lock {path}: {error.strerror}") from error
            warnings.warn(f"{path}: this file system has no locks; a second start is noticed late", stacklevel=3)
            return None
    _held.add(descriptor)
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
    return descriptor


def _holder(descriptor: int) -> str:
    try:
        data = json.loads(os.pread(descriptor, 4096, 0))
        return f"process {data['pid']} on {data['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "by another process"


def _release(descriptor: int | None) -> None:
    if descriptor is not None and descriptor in _held:
        _held.discard(descriptor)
        os.close(descriptor)
