"""What an engine refuses at Submit: the request alone fails, with INVALID and the field; others in the batch go on."""

import math

import pytest

from twinpool.engine.request import FailureCode

BAD = {
    "prompt": [{"prompt": []}, {"prompt": [1, 1000]}, {"prompt": [-1]}, {"prompt": [1] * 256}],
    "output_ids": [{"output": [1000]}],
    "stop_token_ids": [{"stop_token_ids": frozenset({3, 1000})}, {"stop_token_ids": frozenset({-1})}],
    "logit_bias": [{"sampling": {"logit_bias": {1000: 1.0}}}, {"sampling": {"logit_bias": {1: math.inf}}}],
    "max_tokens": [{"max_tokens": 0}, {"max_tokens": 1, "output": [4]}],
    "min_tokens": [{"min_tokens": 9}],
    "n": [{"n": 0}, {"n": 2, "output": [4]}],
    "temperature": [{"sampling": {"temperature": -1.0}}, {"sampling": {"temperature": math.nan}}],
    "top_p": [{"sampling": {"top_p": 0.0}}, {"sampling": {"top_p": 1.5}}],
    "top_k": [{"sampling": {"top_k": -1}}],
    "min_p": [{"sampling": {"min_p": 2.0}}],
    "presence_penalty": [{"sampling": {"presence_penalty": math.inf}}],
    "frequency_penalty": [{"sampling": {"frequency_penalty": math.nan}}],
    "repetition_penalty": [{"sampling": {"repetition_penalty": 0.0}}],
    "logprobs": [{"sampling": {"logprobs": -1}}],
    "prompt_logprobs": [{"sampling": {"prompt_logprobs": -1}}],
}


@pytest.mark.parametrize(("field", "request_"), [(field, item) for field, items in BAD.items() for item in items])
@pytest.mark.parametrize("role", ["decode", "prefill", "remote"])
def test_a_bad_request_fails_alone(harness, field, request_, role):
    h = harness("prefill" if role == "prefill" else "decode")
    transfer = 0 if role == "decode" else 5
    h.submit(1, **{"prompt": [1, 2, 3], "transfer_id": transfer, **request_})
    h.submit(2, [1, 2, 3])
    h.drain()
    failure = h.sink.failures[1]
    assert (failure.code, failure.field) == (FailureCode.INVALID, field)
    assert set(h.sink.failures) == {1}
    assert h.output(2) == h.reference([1, 2, 3], 8)[0]
    if transfer:
        assert (("refuse", 5) in h.exports.log) or (("abandon", 5) in h.imports.log)
    h.assert_empty()


def test_the_limits_themselves_are_served(harness):
    h = harness(num_blocks=80)
    h.submit(1, [0, 999], max_tokens=3, min_tokens=3, stop_token_ids=frozenset({0, 999}))
    h.submit(2, [5] * 255, sampling={"logit_bias": {0: 1.0, 999: -1.0}, "logprobs": 0})
    h.drain()
    assert not h.sink.failures
    h.assert_empty()
