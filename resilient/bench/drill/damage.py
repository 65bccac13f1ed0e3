"""What happens to files without anybody's doing: flipped bits, cut and vanished files, leftovers, a full disk."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

from resilient.checkpoint.manifest import MANIFEST

TMPFS_BYTES = 6 << 20
_PAGE = 4096


def flip_part(folder: Path, random: Random) -> str:
    return _flip(random.choice(_parts(folder)), random)


def flip_manifest(folder: Path, random: Random) -> str:
    return _flip(folder / MANIFEST, random)


def truncate(folder: Path, random: Random) -> str:
    """A part, or now and then the manifest."""
    path = random.choice([*_parts(folder), folder / MANIFEST])
    size = path.stat().st_size
    left = random.randrange(size)
    os.truncate(path, left)
    return f"{path.name} cut to {left} of {size} bytes"


def remove_part(folder: Path, random: Random) -> str:
    path = random.choice(_parts(folder))
    path.unlink()
    return f"{path.name} removed"


DAMAGE: dict[str, Callable[[Path, Random], str]] = {
    "bit flip in a part": flip_part,
    "bit flip in the manifest": flip_manifest,
    "truncation": truncate,
    "part removed": remove_part,
}
"""By name: damages one checkpoint folder and says how."""


def stale_latest(place: Path, random: Random) -> str:
    """A `latest` file, as other tools keep one, that names something else than the newest checkpoint."""
    folders = sorted(p.name for p in place.iterdir() if p.name.startswith("step-"))
    named = random.choice([folders[0], "step-99999999-a99999999", "../..", ""])
    (place / "latest").write_text(named)
    return f"latest says {named!r}"


def orphans(place: Path, random: Random) -> str:
    """What looks newer than everything: a whole checkpoint but for its manifest, another with half of one, a link."""
    newest = max(p for p in place.iterdir() if (p / MANIFEST).exists())
    for step, keep in ((88888888, 0), (88888889, random.randrange(1, 200))):
        copy = place / f"step-{step}-a{step}"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(newest, copy)
        os.truncate(copy / MANIFEST, keep)
        if not keep:
            (copy / MANIFEST).unlink()
    link = place / "step-88888890-a88888890"
    if not link.is_symlink():
        link.symlink_to(newest, target_is_directory=True)
    return f"copies of {newest.name} without a whole manifest, and a link to it"


def _parts(folder: Path) -> list[Path]:
    return sorted(folder.glob("rank-*.pt"))


def _flip(path: Path, random: Random) -> str:
    bit = random.randrange(8 * path.stat().st_size)
    with path.open("r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ (1 << bit % 8)]))
    return f"bit {bit} of {path.name}"


@contextmanager
def small_disk(at: Path) -> Iterator[bool]:
    """A tmpfs of TMPFS_BYTES mounted on the new folder `at`. False where this user may not mount one: a plain folder."""
    at.mkdir(parents=True)
    options = ["-o", f"size={TMPFS_BYTES}", "tmpfs", str(at)]
    try:
        mounted = subprocess.run(["mount", "-t", "tmpfs", *options], capture_output=True, timeout=10).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        mounted = False
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(at)], capture_output=True, timeout=10, check=False)


def fill(disk: Path, leave: int) -> Path:
    """A file that takes all but about `leave` bytes of `disk`."""
    filler = disk / "filler"
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(free - leave, _PAGE))
    return filler
