"""A random Llama of fixed seed, for a GPU without a network: real bfloat16 weights and a real tokenizer.

usage: python benchmarks/random_llama.py FOLDER [--layers 24] [--hidden 2048] [--tensor-parallel 1]
Needs torch and safetensors. The vocabulary is 128 printable single characters, so that generated text is text; head
counts can be shared by `--tensor-parallel` GPUs. About 2.4 GB with the defaults.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

STD = 0.02
VOCABULARY = [chr(c) for c in range(32, 127)] + [chr(c) for c in range(0xC0, 0xC0 + 32)] + ["<|end|>"]
END = len(VOCABULARY) - 1


def config(layers: int, hidden: int, heads: int, kv_heads: int) -> dict[str, Any]:
    """config.json, in the keys that transformers 4 and 5 both read."""
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
        "hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": hidden // heads,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
        "vocab_size": len(VOCABULARY), "bos_token_id": END, "eos_token_id": END, "tie_word_embeddings": False,
    }  # fmt: skip


def tokenizer() -> dict[str, Any]:
    """tokenizer.json: a token a character."""
    end = {"id": END, "content": VOCABULARY[END], "special": True}
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
        "added_tokens": [end | plain],
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False},
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": {c: i for i, c in enumerate(VOCABULARY)}, "unk_token": "?"},
    }  # fmt: skip


def weights(asked: dict[str, Any]) -> dict[str, Any]:
    """Every tensor of a LlamaForCausalLM by its name, from one generator, on the CPU: the same on any machine."""
    import torch

    generator = torch.Generator().manual_seed(20260212)
    hidden, inner, head = asked["hidden_size"], asked["intermediate_size"], asked["head_dim"]
    queries, keys = asked["num_attention_heads"] * head, asked["num_key_value_heads"] * head

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * STD).to(torch.bfloat16)

    found = {"model.embed_tokens.weight": random(len(VOCABULARY), hidden)}
    for layer in range(asked["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        shapes = {
            "self_attn.q_proj": (queries, hidden), "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden), "self_attn.o_proj": (hidden, queries),
            "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
        }  # fmt: skip
        found |= {f"{at}.{name}.weight": random(*shape) for name, shape in shapes.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[f"{at}.{norm}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    found["model.norm.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    found["lm_head.weight"] = random(len(VOCABULARY), hidden)
    return found


def main() -> None:
    """Write the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    options = parser.parse_args()
    from safetensors.torch import save_file

    heads = options.hidden // 128
    asked = config(options.layers, options.hidden, heads, max(heads // 4, options.tensor_parallel))
    options.folder.mkdir(parents=True, exist_ok=True)
    texts = {
        "config.json": asked,
        "generation_config.json": {"bos_token_id": END, "eos_token_id": END},
        "tokenizer.json": tokenizer(),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 8192,
            "clean_up_tokenization_spaces": False, "unk_token": "?",
            "eos_token": VOCABULARY[END], "bos_token": VOCABULARY[END],
        },
    }  # fmt: skip
    for name, value in texts.items():
        (options.folder / name).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    save_file(weights(asked), options.folder / "model.safetensors", metadata={"format": "pt"})
    print(f"{options.folder}: {sum(p.stat().st_size for p in options.folder.iterdir()) / 2**30:.2f} GiB")


if __name__ == "__main__":
    main()
