"""Progress of slow start-up work: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO


class Progress:
    """Says on ``stream`` (standard error) what is being done and how far it is."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self.interactive = self._stream.isatty()

    def note(self, text: str) -> None:
        """Prints one line."""
        print(text, file=self._stream, flush=True)

    @contextmanager
    def bar(self, label: str) -> Iterator[Callable[[int, int], None]]:
        """Shows the progress of one task; the yielded call takes (done, total)."""
        if not self.interactive:
            self.note(label)
            yield lambda done, total: None
            return
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%")
        with Progress(*columns, TimeElapsedColumn(), console=Console(file=self._stream)) as display:
            task = display.add_task(label, total=None)
            yield lambda done, total: display.update(task, completed=done, total=total)
