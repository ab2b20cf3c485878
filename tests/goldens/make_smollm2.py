"""Writes tests/goldens/smollm2.json and .npz: what torch and transformers say of the SmolLM2 file.

It runs OUTSIDE the environment of this project (torch is no dependency), by hand, when the goldens must change:

    python3.11 -m venv /tmp/goldens && /tmp/goldens/bin/pip install torch transformers accelerate gguf numpy
    /tmp/goldens/bin/python tests/goldens/make_smollm2.py PATH/TO/SmolLM2-135M-Instruct.Q4_1.gguf

Weights: the same GGUF file, dequantised by transformers to float32. Token ids: the BPE below, written from the GGUF
metadata alone; transformers' own GGUF tokenizer leaves out the rule that isolates digits first ("\n  12" differs), so
it is only compared where that rule does not matter. Seen with torch 2.13.0, transformers 5.24.0, gguf 0.19.0.
"""

import hashlib
import json
import sys
from pathlib import Path

import gguf
import numpy as np
import regex
import torch
import transformers

SPLIT = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
PLAIN = {
    "plain": "The quick brown fox jumps over the lazy dog. It's what foxes do, isn't it?",
    "unicode": "Zoë café naïve 東京タワー Привет мир 🙂👍🏽 ½ ² e\u0301 \u00a0x\u2003y",
    "code": "def add(a: int, b: int) -> int:\n    '''Sum.'''\n\treturn a + b  # noqa\n\n\nprint(add(1, 22))\r\n",
    "digits": "In 2024, 3.14159 and 1,000,000 cost $42 each\n  12 at 10:30.",
    "spaces": "  two   three    four \n\n \n end  ",
    "special": "<|im_start|>user\nHi<|im_end|>\n<|endoftext|><repo_name>x",
}
CHATS = {
    "france": [{"role": "user", "content": "What is the capital of France?"}],
    "turns": [
        {"role": "system", "content": "Answer in one word."},
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "Four."},
        {"role": "tool", "content": "exit 0\n  12 files"},
    ],
}
LOGITS = ("plain", "unicode", "code", "digits")
EXPECTED = "The capital of France is Paris."
TOP = 20


def byte_characters() -> dict[int, str]:
    """GPT-2's byte alphabet."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


class ReferenceBPE:
    """Byte-level BPE straight from the metadata: specials, single digits, GPT-2 split, merges by rank."""

    def __init__(self, path: Path):
        fields = gguf.GGUFReader(path).fields
        tokens = fields["tokenizer.ggml.tokens"].contents()
        kinds = fields["tokenizer.ggml.token_type"].contents()
        assert fields["tokenizer.ggml.pre"].contents() == "smollm"
        self.ids = {token: id_ for id_, token in enumerate(tokens)}
        self.ranks = {tuple(m.split(" ")): i for i, m in enumerate(fields["tokenizer.ggml.merges"].contents())}
        self.specials = {token for token, kind in zip(tokens, kinds, strict=True) if kind == 3}
        self.special = regex.compile("(" + "|".join(map(regex.escape, self.specials)) + ")")
        self.characters = byte_characters()

    def encode(self, text: str) -> list[int]:
        ids = []
        for piece in self.special.split(text):
            if piece in self.specials:
                ids.append(self.ids[piece])
                continue
            for stretch in regex.split(r"(\p{N})", piece):
                for word in SPLIT.findall(stretch):
                    ids += self.word(word)
        return ids

    def word(self, word: str) -> list[int]:
        parts = [self.characters[byte] for byte in word.encode("utf-8")]
        while len(parts) > 1:
            rank, at = min((self.ranks.get(pair, 1 << 30), i) for i, pair in enumerate(zip(parts, parts[1:])))  # noqa: B905
            if rank == 1 << 30:
                break
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        return [self.ids[part] for part in parts]


def main(path: Path) -> None:
    where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    theirs = transformers.AutoTokenizer.from_pretrained(**where)
    model = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval()
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    bpe = ReferenceBPE(path)
    texts = {name: {"text": text, "ids": bpe.encode(text)} for name, text in PLAIN.items()}
    for name in ("plain", "special"):
        assert theirs(texts[name]["text"]).input_ids == texts[name]["ids"], name
    chats = {}
    for name, messages in CHATS.items():
        text = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        chats[name] = {"messages": messages, "text": text, "ids": bpe.encode(text)}

    prompt = torch.tensor([chats["france"]["ids"]])
    greedy = model.generate(prompt, do_sample=False, max_new_tokens=20)[0, prompt.shape[1] :].tolist()
    answer = theirs.decode(greedy, skip_special_tokens=True)
    assert answer == EXPECTED, answer

    arrays = {"columns": np.arange(0, model.config.vocab_size, 997, dtype=np.int32)}
    rows = {name: texts[name]["ids"] for name in LOGITS} | {"france": chats["france"]["ids"] + greedy[:-1]}
    for name, ids in rows.items():
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0].float()
        values, top = logits.topk(TOP)
        arrays[f"{name}_top_ids"] = top.numpy().astype(np.int32)
        arrays[f"{name}_top_logits"] = values.numpy()
        arrays[f"{name}_column_logits"] = logits.numpy()[:, arrays["columns"]]
    arrays["france_last_logits"] = logits.numpy()[prompt.shape[1] - 1]

    found = {
        "file": {"name": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()},
        "versions": {m.__name__: m.__version__ for m in (torch, transformers, np)},
        "texts": texts,
        "chats": chats,
        "greedy": {"ids": greedy, "text": answer},
        "rows": rows,
    }
    out = Path(__file__).with_name("smollm2.json")
    out.write_text(json.dumps(found, indent=1, ensure_ascii=True) + "\n", encoding="utf-8")
    np.savez_compressed(out.with_suffix(".npz"), **arrays)
    print(f"wrote {out} and .npz ({out.with_suffix('.npz').stat().st_size} bytes)")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
