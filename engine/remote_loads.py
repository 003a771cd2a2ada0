"""Decode side of the exchange, as the engine sees it: what each message of an exchange does to its request.

1. RemoteReadable: the request joins the queue. (The scheduler then reserves its blocks and calls ``reserved``.)
2. RemoteLoaded: blocks are cached, token 0 is said, the request runs. Only now is the KV used.
3. RemoteFinished, RemoteLost, Cancel, deadline: the attempt ends; its destination stays in quarantine.
4. DestinationSafe: quarantined blocks are freed.

Messages of unknown exchanges are late, and are ignored: the Submit is posted before its exchange is opened.
"""

from __future__ import annotations

from twinpool.engine.attempts import Attempts
from twinpool.engine.commands import DestinationSafe, RemoteFinished, RemoteLoaded, RemoteLost, RemoteReadable
from twinpool.engine.outputs import OutputCollector
from twinpool.engine.postprocessor import Postprocessor
from twinpool.engine.request import FailureCode, RequestState
from twinpool.engine.scheduler import Blocker, Scheduler

RemoteCommand = RemoteReadable | RemoteLoaded | RemoteFinished | RemoteLost | DestinationSafe


class RemoteLoads:
    """Applies messages of exchanges to requests of this engine."""

    def __init__(
        self, scheduler: Scheduler, attempts: Attempts, postprocessor: Postprocessor, outputs: OutputCollector
    ) -> None:
        self._scheduler = scheduler
        self._attempts = attempts
        self._postprocessor = postprocessor
        self._outputs = outputs

    def handle(self, command: RemoteCommand, now: float) -> None:
        """Applies one message."""
        transfer_id = command.transfer_id
        request = self._attempts.by_transfer(transfer_id)
        match command:
            case DestinationSafe():
                self._attempts.destination_safe(transfer_id)
            case RemoteLoaded():
                self._loaded(command, now)
            case RemoteReadable() if request is not None:
                self._scheduler.unblock(request, Blocker.REMOTE_KV)
            case RemoteFinished() if request is not None:
                self._outputs.ended(request)
                self._attempts.abort(request.attempt_id, "finished on prefill", now, exchange_ended=True)
            case RemoteLost() if request is not None:
                self._outputs.fail(request, command.code, command.reason)
                self._attempts.abort(request.attempt_id, command.reason, now, exchange_ended=True)
            case _:
                pass

    def _loaded(self, command: RemoteLoaded, now: float) -> None:
        request = self._attempts.by_transfer(command.transfer_id)
        if request is None or request.state is not RequestState.LOADING:
            # The request ended while this was under way; a loaded exchange sends no DestinationSafe.
            self._attempts.destination_safe(command.transfer_id)
            return
        self._attempts.transfer_confirmed(command.transfer_id)
        stats = request.stats
        stats.remote_tokens = request.num_tokens - stats.cached_tokens
        stats.transfer_s = command.transfer_s
        stats.exposed_transfer_s = command.exposed_transfer_s
        stats.transfer_bytes = command.transfer_bytes
        stats.transport = command.transport
        stats.read_s, stats.sample_s, stats.confirm_s = command.read_s, command.sample_s, command.confirm_s
        request.confirmed_at = command.confirmed_at
        self._scheduler.loaded(request, now)
        self._outputs.loaded(request)
        try:
            self._postprocessor.start(request, command.first_tokens, now)
        except ValueError as error:
            # Prefill and decode disagree about the request; the attempt fails, the engine goes on.
            self._outputs.fail(request, FailureCode.INTERNAL, str(error))
            self._attempts.abort(request.attempt_id, str(error), now)
