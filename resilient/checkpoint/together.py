"""What every rank does in the background, and when all of them know that it is done.

A rank votes on where its own work stands, every quarter of a second, until all are ready or one has failed: so the vote's
own deadline need not exceed the time that the slowest rank takes to write."""

from __future__ import annotations

import logging
from collections.abc import Callable

from resilient.checkpoint.storage import redact
from resilient.checkpoint.writer import GivenUp, Task, Writer

log = logging.getLogger(__name__)

_ROUND_S = 0.25


class Together:
    """vote: collective, True only if every rank said True. `problem` says what went wrong last."""

    def __init__(self, rank: int, vote: Callable[[bool], bool], writer: Writer, deadline_s: float) -> None:
        self.rank, self.deadline_s = rank, deadline_s
        self.problem = ""
        self.writer = writer
        self._vote = vote

    def agree(self, what: str, action: Callable[[Task], None]) -> bool:
        """One piece of work on all ranks, waited for. Collective; an error on one rank is a no from all."""
        task = self.writer.submit(what, action, self.deadline_s)
        while True:
            task.wait(_ROUND_S)
            failed, ready = self.where_all_stand(task)
            if failed:
                self.blame(what, task)
                task.give_up()
                return False
            if ready:
                return True

    def where_all_stand(self, task: Task) -> tuple[bool, bool]:
        """(a rank has failed, all are ready). Collective."""
        finished, failed = task.finished, task.failed
        if not self._vote(not failed):
            return True, False
        return False, self._vote(finished)

    def blame(self, what: str, task: Task) -> None:
        if task.failed and not isinstance(task.error, GivenUp):
            self.problem = f"rank {self.rank} could not {what}: {redact(str(task.error) or type(task.error).__name__)}"
            log.warning("%s", self.problem)
        else:
            self.problem = f"another rank could not {what}; its log says why"
