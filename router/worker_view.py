"""A connected worker at one moment, frozen, and who may exchange KV with whom."""

from __future__ import annotations

from dataclasses import dataclass

from twinpool.router.costs import WorkerKey
from twinpool.router.messages import LinkReport, Report, WorkerInfo


@dataclass(frozen=True, slots=True)
class WorkerView:
    """What the policy knows of a worker.

    ``sent_requests`` and ``sent_tokens`` (prompt tokens to compute) are what this router has added since the report,
    less what has ended since; ``sent_kv_tokens`` is the room that was asked for since. ``cached_blocks`` is the size of
    its prefix cache as far as it is known.
    """

    info: WorkerInfo
    report: Report
    suspect: bool = False
    sent_requests: int = 0
    sent_tokens: int = 0
    sent_kv_tokens: int = 0
    cached_blocks: int = 0

    @property
    def key(self) -> WorkerKey:
        """Identity and epoch."""
        return self.info.worker_id, self.info.epoch

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens to be computed ahead of a new request."""
        return max(self.report.queued_tokens + self.sent_tokens, 0)

    @property
    def streams(self) -> int:
        """Requests that are there, running or not yet."""
        report = self.report
        return max(report.running + report.waiting + report.loading + self.sent_requests, 0)

    @property
    def load(self) -> float:
        """Requests as a share of the largest batch."""
        return self.streams / max(self.info.max_num_seqs, 1)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens``."""
        return -(-num_tokens // max(self.info.block_size, 1))


def incompatibility(prefill: WorkerInfo, decode: WorkerInfo) -> str | None:
    """Why two workers must never exchange KV, with both values; None when they may."""
    if prefill.revision != decode.revision:
        return (
            f"model revision differs: {prefill.worker_id} has {prefill.revision}, "
            f"{decode.worker_id} has {decode.revision}"
        )
    if prefill.layout != decode.layout:
        return (
            f"KV layout differs: {prefill.worker_id} has {prefill.layout_text or prefill.layout}, "
            f"{decode.worker_id} has {decode.layout_text or decode.layout}"
        )
    return None


def link_between(prefill: WorkerView, decode: WorkerView) -> LinkReport | None:
    """The working link of a pair, or None."""
    if incompatibility(prefill.info, decode.info) is not None:
        return None
    for link in decode.report.links:
        if link.linked and link.worker_id == prefill.info.worker_id and link.epoch == prefill.info.epoch:
            return link
    return None
