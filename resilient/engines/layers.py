"""Layer groups: which part of the model a parameter belongs to, and sums of squares by group (S3)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from resilient.engines.norms import squares

MOST_GROUPS = 64
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")  # torch.compile, FSDP1, checkpointing


def layer_groups(names: Iterable[str], most: int = MOST_GROUPS) -> dict[str, str]:
    """Parameter name -> layer group, in the order given.

    A parameter inside a repeated container (a path component that is a number, with another number beside it) belongs
    to the group of that path: `transformer.h.3.attn.qkv.weight` to `transformer.h.3`. Any other belongs to its
    shortest prefix that is not an ancestor of a repeated container: `transformer.wte.weight` to `transformer.wte`,
    `head.weight` to `head`. Names that wrappers put into the path are left out. Beyond `most` groups the middle ones
    become one, called after its first and last, `h.31..h.64`.
    """
    paths = {name: tuple(part for part in name.split(".") if part not in _WRAPPERS) for name in names}
    beside: dict[tuple[str, ...], set[str]] = {}  # container -> the numbers in it
    for path in paths.values():
        for i, part in enumerate(path):
            if part.isdigit():
                beside.setdefault(path[:i], set()).add(part)
    repeated = {container for container, numbers in beside.items() if len(numbers) > 1}
    ancestors = {container[:i] for container in repeated for i in range(len(container) + 1)}
    groups = {name: ".".join(_prefix(path, repeated, ancestors)) for name, path in paths.items()}
    merged = _merge_middle(list(dict.fromkeys(groups.values())), most)
    return {name: merged[group] for name, group in groups.items()}


def _prefix(path: tuple[str, ...], repeated: set[tuple[str, ...]], ancestors: set[tuple[str, ...]]) -> tuple[str, ...]:
    for i in range(1, len(path)):
        if path[:i] not in ancestors or (path[: i - 1] in repeated and path[i - 1].isdigit()):
            return path[:i]
    return path


def _merge_middle(groups: Sequence[str], most: int) -> dict[str, str]:
    """Group -> itself, or the name of the one that holds the middle."""
    if len(groups) <= most:
        return {group: group for group in groups}
    first = most // 2
    last = len(groups) - (most - first - 1)
    middle = f"{groups[first]}..{groups[last - 1]}"
    return {group: middle if first <= i < last else group for i, group in enumerate(groups)}


class Part(NamedTuple):
    """Which elements of a tensor are whose. layer: index of the group. weight: the share of them that this rank counts
    (1/n where n ranks hold the same). start, stop: of the flat tensor; stop None: the whole tensor."""

    layer: int
    weight: float = 1.0
    start: int = 0
    stop: int | None = None


class Layers:
    """The layer groups of one module, and sums of squares by group without a host sync.

    parameters: name -> elements of the whole parameter, over all ranks. The same on all ranks that hold the same module.
    names: of the groups, in the module's order. sizes: elements of each.
    """

    def __init__(self, parameters: Mapping[str, int], device: torch.device) -> None:
        groups = layer_groups(parameters)
        self.names = tuple(dict.fromkeys(groups.values()))
        position = {group: i for i, group in enumerate(self.names)}
        self.of = {name: position[group] for name, group in groups.items()}  # parameter name -> index of its group
        self.sizes = [0] * len(self.names)
        for name, size in parameters.items():
            self.sizes[self.of[name]] += size
        self._device = device
        self._plans: dict[tuple[tuple[int, float], ...], tuple[torch.Tensor, torch.Tensor]] = {}

    @torch.no_grad()
    def sums(self, parts: Sequence[tuple[torch.Tensor, Part]]) -> torch.Tensor:
        """(len(names),) float64 on the device: weighted sums of squares. A NaN or Inf stays in its own group."""
        found, owners = squares([_cut(tensor, part) for tensor, part in parts], self._device)
        index, weights = self._plan(tuple((parts[i][1].layer, parts[i][1].weight) for i in owners))
        # a gather and a sum rather than index_add: in the same order every time, on every device
        return torch.cat((found * weights, found.new_zeros(1)))[index].sum(1)

    def _plan(self, entries: tuple[tuple[int, float], ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """(groups, widest) positions of each group's entries, filled up with that of a zero, and (entries,) weights.
        Kept: a window's tensors are nearly always those of the window before."""
        plan = self._plans.get(entries)
        if plan is None:
            members: list[list[int]] = [[] for _ in self.names]
            for i, (layer, _) in enumerate(entries):
                members[layer].append(i)
            widest = max(map(len, members), default=0)
            rows = [row + [len(entries)] * (widest - len(row)) for row in members]
            if len(self._plans) > 32:
                self._plans.clear()
            plan = self._plans[entries] = (
                torch.tensor(rows, dtype=torch.int64, device=self._device).reshape(len(rows), widest),
                torch.tensor([weight for _, weight in entries], dtype=torch.float64, device=self._device),
            )
        return plan


def _cut(tensor: torch.Tensor, part: Part) -> torch.Tensor:
    return tensor if part.stop is None else tensor.detach().view(-1)[part.start : part.stop]
