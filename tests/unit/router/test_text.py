"""Tokens to text and back: characters, stop strings, templates."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from twinpool.errors import ConfigError, InvalidRequest, Unsupported
from twinpool.router.chat_template import ChatTemplate, Conversation
from twinpool.router.detokenizer import Detokenizer
from twinpool.router.stop_strings import StopStrings
from twinpool.router.text import ModelText


def run(tokenizer: Tokenizer, prompt: list[int], tokens: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt)
    return [detokenizer.push(token) for token in tokens] + [detokenizer.flush()]


@pytest.mark.parametrize("said", ["plain", "né", "👩‍👩‍👧 family", "日本語", "a\ufffdb", ""])
def test_pieces_add_up(tokenizer: Tokenizer, said: str) -> None:
    pieces = run(tokenizer, tokenizer.encode("prompt").ids, tokenizer.encode(said).ids)
    assert "".join(pieces) == said


def test_half_a_character_is_held_back_and_replaced_at_the_end(tokenizer: Tokenizer) -> None:
    first, second = tokenizer.encode("é").ids
    assert run(tokenizer, [], [first, second]) == ["", "é", ""]
    assert run(tokenizer, [], [first]) == ["", "\ufffd"]
    assert "".join(run(tokenizer, [first], [second, *tokenizer.encode("x").ids])) == "\ufffdx"


def test_special_tokens_are_no_text(tokenizer: Tokenizer, eos: int) -> None:
    tokens = [*tokenizer.encode("a").ids, eos, *tokenizer.encode("b").ids]
    assert "".join(run(tokenizer, [], tokens)) == "ab"


def byte_fallback_tokenizer() -> Tokenizer:
    vocab = {"<unk>": 0} | {f"<0x{i:02X}>": i + 1 for i in range(256)}
    for word in ("\u2581", "a", "b", "\u2581a"):
        vocab[word] = len(vocab)
    model = models.BPE(vocab=vocab, merges=[("\u2581", "a")], byte_fallback=True, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def test_a_space_after_the_prompt_is_kept() -> None:
    tokenizer = byte_fallback_tokenizer()
    a, space_a = tokenizer.token_to_id("a"), tokenizer.token_to_id("\u2581a")
    assert "".join(run(tokenizer, [a], [space_a, a])) == " aa"


@given(st.lists(st.integers(1, 260), max_size=30))
@settings(max_examples=200, deadline=None)
def test_any_bytes_are_survived(tokens: list[int]) -> None:
    tokenizer = byte_fallback_tokenizer()
    pieces = run(tokenizer, [tokenizer.token_to_id("a")], tokens)
    assert all(isinstance(piece, str) for piece in pieces)


@given(st.text(alphabet="abE", max_size=30), st.lists(st.text(alphabet="abE", min_size=1, max_size=4), max_size=3))
@settings(max_examples=300, deadline=None)
def test_stop_strings_do_not_depend_on_the_pieces(text: str, stops: list[str]) -> None:
    def cut(pieces: list[str]) -> tuple[str, str | None]:
        stop = StopStrings(stops, include=False)
        shown = "".join(stop.push(piece) for piece in pieces)
        return shown + ("" if stop.matched else stop.flush()), stop.matched

    whole = cut([text])
    assert cut(list(text)) == whole
    split = random.Random(len(text)).randint(0, len(text))
    assert cut([text[:split], text[split:]]) == whole
    shown, matched = whole
    assert text.startswith(shown)
    if matched is None:
        assert shown == text
        assert not any(stop in text for stop in stops)
    else:
        assert not any(stop in shown for stop in stops)
        assert text[len(shown) :].startswith(matched)


def test_text_that_cannot_become_a_stop_string_is_not_held_back() -> None:
    stop = StopStrings(["END"], include=False)
    assert [stop.push(piece) for piece in ("a", "E", "N", "x", "E")] == ["a", "", "", "ENx", ""]
    assert stop.flush() == "E"


def test_bos_is_not_doubled(tokenizer: Tokenizer) -> None:
    from tokenizers import processors

    copy = Tokenizer.from_str(tokenizer.to_str())
    bos = copy.token_to_id("<s>")
    copy.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    text = ModelText(copy, bos_token="<s>")
    assert text.encode_text("a") == [bos, *tokenizer.encode("a").ids]
    assert text.encode_text("<s>a") == [bos, *tokenizer.encode("a").ids]


def test_template_like_transformers() -> None:
    source = "{% for m in messages %}\n    {% if m.role == 'user' %}\nU:{{ m.content }}\n    {% endif %}\n{% endfor %}"
    template = ChatTemplate(source + "{% generation %}x{% endgeneration %}{{ messages | tojson }}", {})
    assert (
        template.render(Conversation([{"role": "user", "content": "<é>"}]))
        == 'U:<é>\nx[{"role": "user", "content": "<é>"}]'
    )


@pytest.mark.parametrize("source", ["{{ raise_exception('no') }}", "{{ ''.__class__.__mro__ }}", "{{ messages + 1 }}"])
def test_template_refusals(source: str) -> None:
    with pytest.raises(InvalidRequest, match="chat template"):
        ChatTemplate(source, {}).render(Conversation([{"role": "user", "content": "x"}]))


def test_no_template(tokenizer: Tokenizer) -> None:
    with pytest.raises(Unsupported, match="no chat template"):
        ModelText(tokenizer).encode_messages(Conversation([{"role": "user", "content": "x"}]))


def test_model_folder(model_folder: Path, tmp_path: Path, eos: int) -> None:
    text = ModelText.load(model_folder)
    assert text.eos_ids == {eos}
    assert text.token_bytes(text.encode_text("é")[0]) == b"\xc3"
    assert text.token_text(eos) == "<|im_end|>"
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        ModelText.load(tmp_path)


def test_jinja_file_wins(model_folder: Path, tmp_path: Path) -> None:
    for path in model_folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "chat_template.jinja").write_text("T{{ eos_token }}")
    ids: Any = ModelText.load(tmp_path).encode_messages(Conversation([{"role": "user", "content": "x"}]))
    assert ModelText.load(tmp_path).token_text(ids[0]) == "T"


async def test_long_prompts_do_not_stop_the_event_loop(tokenizer: Tokenizer) -> None:
    text = ModelText(tokenizer)
    long = "a long prompt " * 100_000
    for call in (lambda: text.encode_text(long), lambda: text.decode([0] * 3_000_000)):
        work, turns = asyncio.create_task(asyncio.to_thread(call)), 0
        while not work.done():
            await asyncio.sleep(0.001)
            turns += 1
        # With the interpreter's lock held the loop gets a turn before the call and one after it.
        assert turns > 10
