"""Where in a step something was found."""

from __future__ import annotations

from typing import Literal

Place = Literal["forward", "loss", "backward", "reduction", "optimizer"]
"""forward: the model's output; loss: only the loss; backward: this rank's gradient before reduction;
reduction: only the reduced gradient; optimizer: parameters after a step."""

PLACES: tuple[Place, ...] = ("forward", "loss", "backward", "reduction", "optimizer")
