"""Make the lab's tiny GPT-2: real safetensors weights and a real tokenizer, byte-identical every time.

Standard library only, and integers until the last step: each weight is a sum of uniform draws from
`random.Random(seed).getrandbits`, which Python defines exactly, so no BLAS, libm or torch version can move a bit.
The tokenizer's vocabulary is printable single characters; with a byte-level one the generated text is empty and
sglang.bench_serving reports TTFT 0.00 beside a fine-looking throughput.

REQUEST: path, and model {"seed", "hidden", "layers", "heads", "positions", "std"}.
"""

import random
import struct


def printable_vocabulary():
    """The 95 printable ASCII characters, then Latin letters up to a vocabulary of 128 with one end-of-text token."""
    characters = [chr(c) for c in range(32, 127)]
    characters += [chr(c) for c in range(0xC0, 0xC0 + 127 - len(characters))]
    return characters + ["<|end|>"]


def bfloat16(value):
    """Nearest-even bfloat16 bits of a float, as two little-endian bytes."""
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    return struct.pack("<H", ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF)


def weights(rng, count, std):
    """`count` bfloat16 weights of mean 0 and standard deviation `std`: a sum of four 14-bit uniform draws."""
    # Four uniform draws on [0, n) have variance 4 * (n*n - 1) / 12 around a mean of 4 * (n - 1) / 2.
    n = 1 << 14
    scale = std / ((n * n - 1) / 3) ** 0.5
    centre = 2 * (n - 1)
    out = bytearray()
    for _ in range(count):
        draw = rng.getrandbits(56)
        total = (draw & 16383) + (draw >> 14 & 16383) + (draw >> 28 & 16383) + (draw >> 42)
        out += bfloat16((total - centre) * scale)
    return bytes(out)


def tensors(hidden, layers, positions, vocab, std, seed):
    """(name, shape, bytes) of every GPT2LMHeadModel tensor, in the order of the file. Conv1D shapes: (in, out)."""
    rng = random.Random(seed)
    ones, zeros = bfloat16(1.0), bfloat16(0.0)

    def norm(name):
        yield name + ".bias", [hidden], zeros * hidden
        yield name + ".weight", [hidden], ones * hidden

    def linear(name, fan_in, fan_out):
        yield name + ".bias", [fan_out], zeros * fan_out
        yield name + ".weight", [fan_in, fan_out], weights(rng, fan_in * fan_out, std)

    for layer in range(layers):
        at = "transformer.h.%d." % layer
        yield from linear(at + "attn.c_attn", hidden, 3 * hidden)
        yield from linear(at + "attn.c_proj", hidden, hidden)
        yield from norm(at + "ln_1")
        yield from norm(at + "ln_2")
        yield from linear(at + "mlp.c_fc", hidden, 4 * hidden)
        yield from linear(at + "mlp.c_proj", 4 * hidden, hidden)
    yield from norm("transformer.ln_f")
    yield "transformer.wpe.weight", [positions, hidden], weights(rng, positions * hidden, std)
    yield "transformer.wte.weight", [vocab, hidden], weights(rng, vocab * hidden, std)


def safetensors(named):
    """The bytes of a safetensors file: an 8-byte header length, a JSON header, the tensors one after another."""
    header, body, offset = {"__metadata__": {"format": "pt"}}, [], 0
    for name, shape, data in named:
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + len(data)]}
        body.append(data)
        offset += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(body)


def files(hidden, layers, heads, positions, std, seed):
    """{file name: bytes} of the whole model folder."""
    vocab = printable_vocabulary()
    end = len(vocab) - 1
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "n_embd": hidden,
        "n_layer": layers,
        "n_head": heads,
        "n_positions": positions,
        "n_ctx": positions,
        "vocab_size": len(vocab),
        "bos_token_id": end,
        "eos_token_id": end,
        "initializer_range": std,
        "layer_norm_epsilon": 1e-5,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "normalizer": None,
        "post_processor": None,
        "added_tokens": [
            {
                "id": end,
                "content": vocab[end],
                "special": True,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
            }
        ],
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "[\\s\\S]"}, "behavior": "Isolated", "invert": False},
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": {c: i for i, c in enumerate(vocab)}, "unk_token": "?"},
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": positions,
        "eos_token": vocab[end],
        "bos_token": vocab[end],
        "unk_token": "?",
        "clean_up_tokenization_spaces": False,
    }

    def text(value):
        return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()

    return {
        "config.json": text(config),
        "generation_config.json": text({"bos_token_id": end, "eos_token_id": end}),
        "model.safetensors": safetensors(tensors(hidden, layers, positions, len(vocab), std, seed)),
        "tokenizer.json": text(tokenizer),
        "tokenizer_config.json": text(tokenizer_config),
    }


def main():
    folder = REQUEST["path"]
    os.makedirs(folder, exist_ok=True)
    made = files(**REQUEST["model"])
    for name, data in made.items():
        write_atomic(os.path.join(folder, name), data)
        print("wrote %s (%d bytes)" % (os.path.join(folder, name), len(data)))
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in made.items()}
    write_json(os.path.join(folder, "gpuwright-model.json"), {"model": REQUEST["model"], "files": digests})


main()
