"""48-bit digests of text and bytes that ride in a row: exact in a float64, equal on ranks that hold the same."""

from __future__ import annotations

import hashlib

MASK_48 = (1 << 48) - 1


def short_digest(data: bytes) -> float:
    """48 bits of BLAKE2b."""
    return float(int.from_bytes(hashlib.blake2b(data, digest_size=6).digest(), "big"))
