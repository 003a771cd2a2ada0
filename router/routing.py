"""Where attempts go, and what is learned from what became of them: the policy with its memory. One per router.

1. ``choose`` asks the policy, with frozen views, the learned costs, and how much of the prompt each worker is believed
   to cache.
2. ``sent`` notes what the attempt will leave in the caches of its workers; cache events confirm it, or it expires.
3. ``told`` and ``answered`` take the workers' accounts and the router's clock; the learner forgets them slowly.

Nothing here belongs to one request. What is believed of a worker's cache lives and ends with the session.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

from twinpool.errors import InvalidRequest, Overloaded, TwinpoolError, Unavailable
from twinpool.router.attempt import Attempt
from twinpool.router.costs import Costs
from twinpool.router.learner import Learner
from twinpool.router.messages import Role, Stats
from twinpool.router.policy import NoRoute, Obstacle, Route, RouteQuery, choose
from twinpool.router.prompt_blocks import PromptBlocks
from twinpool.router.registry import Registry

_EXPECT_S = 5.0
"""Beyond twice the estimated prefill, until the events of a request's blocks must have come."""


class Routing:
    """See the module docstring; event loop only."""

    def __init__(self, registry: Registry, pace_weight: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.learner = Learner()
        self._registry = registry
        self._pace_weight = pace_weight
        self._clock = clock

    def costs(self) -> Costs:
        """What is reckoned with now."""
        return self.learner.costs(self._clock())

    def choose(self, query: RouteQuery, blocks: PromptBlocks) -> Route | NoRoute:
        """A route for ``query``, whose tokens are those of ``blocks``."""
        now = self._clock()
        cached = {
            session.info.worker_id: session.prefixes.matched(blocks.of(session.info), now)
            for session in self._registry.sessions
            if session.usable and session.info is not None
        }
        query = dataclasses.replace(query, cached_blocks=cached, pace_weight=self._pace_weight)
        return choose(query, self._registry.views(), self.learner.costs(now))

    def sent(self, attempt: Attempt, blocks: PromptBlocks) -> None:
        """An attempt goes to its workers."""
        attempt.submitted = self._clock()
        expires = attempt.submitted + _EXPECT_S + 2 * attempt.route.first_s
        for session in (attempt.prefill, attempt.decode):
            if session is not None and session.info is not None:
                session.prefixes.expect(blocks.of(session.info), expires)

    def told(self, attempt: Attempt, role: Role, stats: Stats) -> None:
        """A worker's first account of an attempt, which comes with its first token there."""
        now, route = self._clock(), attempt.route
        if role == "decode" and route.prefill is not None:
            self.learner.copied(route.prefill, route.decode, stats.remote_tokens, stats.exposed_transfer_s, now)
        else:
            worker = route.prefill or route.decode
            tokens = route.ahead_tokens + stats.computed_tokens
            self.learner.first_token(worker, tokens, now - attempt.submitted, now)
            self.learner.prompt(stats.cached_tokens, stats.computed_tokens)

    def answered(self, attempt: Attempt, tokens: int, decode_s: float) -> None:
        """A request ended well with its ``tokens`` (per choice) in ``decode_s`` after the first one."""
        route = attempt.route
        self.learner.answered(route.decode, route.streams, tokens, decode_s, self._clock())


def error_for(route: NoRoute) -> TwinpoolError:
    """What the client is to hear."""
    if route.obstacle is Obstacle.TOO_LARGE:
        return InvalidRequest(route.message, "prompt")
    if route.obstacle is Obstacle.BARRED:
        return Overloaded(f"{route.message}; retry later")
    return Unavailable(route.message)
