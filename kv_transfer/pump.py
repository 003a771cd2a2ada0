"""What the transfer thread of a prefill worker does: the hold table, and progress for those who read from us."""

from __future__ import annotations

from twinpool.kv_transfer.connectors.base import Connector
from twinpool.kv_transfer.holds import HoldTable
from twinpool.kv_transfer.transfer_thread import PUMP_INTERVAL_S, Tick


def export_tick(holds: HoldTable, connector: Connector) -> Tick:
    """Makes the tick: it asks for the next ``PUMP_INTERVAL_S`` only while somebody may be reading."""

    def tick(now: float) -> float | None:
        due = holds.poll(now)
        if not (connector.pumped and holds.active):
            return due
        connector.progress()
        return now + PUMP_INTERVAL_S

    return tick
