import pytest

from twinpool.engine.request import FinishReason, StopParams
from twinpool.engine.stopping import Ending, StopRules

RULES = StopRules(frozenset({7}), 20)
STOP7, STOP9, LENGTH = Ending(FinishReason.STOP, 7), Ending(FinishReason.STOP, 9), Ending(FinishReason.LENGTH)


@pytest.mark.parametrize(
    ("stop", "token", "num_outputs", "num_tokens", "ending"),
    [
        (StopParams(8), 5, 1, 10, None),
        (StopParams(8), 7, 1, 10, STOP7),
        (StopParams(8, ignore_eos=True), 7, 1, 10, None),
        (StopParams(8, ignore_eos=True, stop_token_ids=frozenset({7})), 7, 1, 10, STOP7),
        (StopParams(8, stop_token_ids=frozenset({9})), 9, 1, 10, STOP9),
        (StopParams(8), 5, 8, 10, LENGTH),
        (StopParams(8), 7, 8, 10, STOP7),
        (StopParams(8), 5, 1, 20, LENGTH),
        (StopParams(8), 5, 1, 19, None),
        (StopParams(8, min_tokens=3), 7, 2, 10, None),
        (StopParams(8, min_tokens=3), 7, 3, 10, STOP7),
        (StopParams(2, min_tokens=3), 7, 2, 10, LENGTH),
    ],
)
def test_stop_check(stop, token, num_outputs, num_tokens, ending):
    assert RULES.check(stop, token, num_outputs, num_tokens) == ending
