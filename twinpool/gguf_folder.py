"""Turns a Llama-family GGUF file with a byte-level BPE vocabulary into a Hugging Face folder.

Weights are dequantised and rounded to bfloat16, the rows of q and k return to Hugging Face order, and the tokenizer
is rebuilt from the vocabulary and merges in the file. Needs numpy and gguf, not torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinpool.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_CONTROL_TOKEN = 3  # gguf.TokenType.CONTROL

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OTHER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def write_folder(gguf_file: Path, folder: Path, progress: Callable[[int, int], None]) -> None:
    """Writes ``folder`` (existing, empty) from ``gguf_file``.

    ``progress(done, total)`` counts tensors.

    Raises:
        ConfigError: the file is not a Llama with a byte-level BPE vocabulary that is known here.
    """
    import gguf

    reader = gguf.GGUFReader(gguf_file)
    fields = {key: field.contents() for key, field in reader.fields.items()}
    architecture = fields.get("general.architecture")
    vocabulary = (fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre"))
    if architecture != "llama" or vocabulary != ("gpt2", "smollm"):
        raise ConfigError(
            f"{gguf_file.name} holds architecture {architecture} with tokenizer {vocabulary}, which is not known here; "
            "use a Hugging Face folder instead"
        )
    _write_weights(reader, fields, folder / "model.safetensors", progress)
    tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    _write_json(folder / "config.json", _config(fields, tied))
    _write_json(folder / "generation_config.json", _generation_config(fields))
    _write_tokenizer(fields, folder)


def _write_weights(reader: Any, fields: dict[str, Any], path: Path, progress: Callable[[int, int], None]) -> None:
    import numpy as np
    from gguf.quants import dequantize

    tensors: dict[str, NDArray[np.uint16]] = {}
    for done, tensor in enumerate(reader.tensors, start=1):
        name = _weight_name(tensor.name)
        values = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        if name.endswith("q_proj.weight"):
            values = unpermute(values, fields["llama.attention.head_count"])
        elif name.endswith("k_proj.weight"):
            values = unpermute(values, fields["llama.attention.head_count_kv"])
        tensors[name] = to_bfloat16(values)
        progress(done, len(reader.tensors))
    _write_safetensors(path, tensors)


def _write_safetensors(path: Path, tensors: dict[str, NDArray[np.uint16]]) -> None:
    """Writes bfloat16 bit patterns: the length of the header, the header as JSON padded to 8 bytes, the data.

    Its own writer, because the library's takes bfloat16 only from torch.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, bits in tensors.items():
        header[name] = {"dtype": "BF16", "shape": bits.shape, "data_offsets": (offset, offset + bits.nbytes)}
        offset += bits.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for bits in tensors.values():
            file.write(bits.data)


def _weight_name(gguf_name: str) -> str:
    parts = gguf_name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.weight"
    return f"{_OTHER_NAMES[parts[0]]}.weight"


def unpermute(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Undoes GGUF's interleaving of the rotary pairs in the rows ``[heads * head_dim, width]`` of q or k.

    llama.cpp rotates neighbouring rows, Hugging Face rows half a head apart; convert_hf_to_gguf.py interleaves them.
    """
    half = rows.shape[0] // heads // 2
    return rows.reshape(heads, half, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Bit patterns of ``values`` (finite) rounded to bfloat16, ties to even, as torch rounds."""
    import numpy as np

    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)


def _config(fields: dict[str, Any], tied: bool) -> dict[str, Any]:
    heads = fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.embedding_length"] // heads,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": fields["llama.context_length"],
        # The file stores float32; 9 digits bring back the decimal number that was meant (1e-05).
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": fields["llama.rope.freq_base"],
        "vocab_size": fields["llama.vocab_size"],
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
    }


def _generation_config(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def _write_tokenizer(fields: dict[str, Any], folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    # llama.cpp's "smollm" pre-tokenizer: digits one by one, then GPT-2's byte-level pattern.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, fields["tokenizer.ggml.token_type"], strict=True)
            if kind == _CONTROL_TOKEN
        ]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {
        "bos_token": fields["tokenizer.ggml.bos_token_id"],
        "eos_token": fields["tokenizer.ggml.eos_token_id"],
        "unk_token": fields["tokenizer.ggml.unknown_token_id"],
        "pad_token": fields["tokenizer.ggml.padding_token_id"],
    }
    template = fields["tokenizer.chat_template"]
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": fields["llama.context_length"],
            "clean_up_tokenization_spaces": False,
            "add_prefix_space": False,
            **{name: tokens[index] for name, index in named.items()},
            "chat_template": template,
        },
    )
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
