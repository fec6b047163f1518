#!/usr/bin/env python3
"""Makes successive bf16 versions of a real model, as one training step after the other would leave them.

    make_versions.py --model DIR --out DIR [--versions 10] [--lr 1e-6] [--method auto|fine-tune|adam-like]

OUT/step_00, step_01 … are HF model directories: model.safetensors in bf16 and the source's other files. The master
weights stay fp32 and are cast for each version, so unchanged elements are bit for bit the same.

fine-tune   real: contrastive fine-tuning (a sentence against itself under other dropout, the other sentences of the
            batch as negatives) with AdamW on the sentences of this project's own documentation. Needs torch and
            transformers.
adam-like   the real weights, but gradients of random numbers: each element's update is lr * m / (sqrt(v) + eps) with
            Adam's own moments and bias correction, so that its size is that of a real step; which elements move is not
            what a training would choose. Needs numpy only.

auto takes fine-tune when both packages can be imported, and says which it took. Weights that are not floating point
stay as they are.
"""

import argparse
import json
import pathlib
import re
import shutil
import struct
import sys

import numpy as np

DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16}


def read_safetensors(path):
    """name → (dtype, shape, bytes), in file order."""
    data = path.read_bytes()
    (header_bytes,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + header_bytes])
    header.pop("__metadata__", None)
    base = 8 + header_bytes
    items = sorted(header.items(), key=lambda item: item[1]["data_offsets"][0])
    return {
        name: (entry["dtype"], entry["shape"], data[base + entry["data_offsets"][0] : base + entry["data_offsets"][1]])
        for name, entry in items
    }


def write_safetensors(path, tensors):
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, _, data in tensors.values():
            file.write(data)


def to_float32(dtype, data):
    """A flat fp32 array, or None if the tensor is no floating-point weight."""
    if dtype in DTYPES:
        return np.frombuffer(data, DTYPES[dtype]).astype(np.float32)
    if dtype == "BF16":
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return None


def to_bf16(values):
    """Round to nearest even, as torch does. NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    nan = np.isnan(values)
    rounded[nan] = 0x7FC0
    return rounded.tobytes()


class AdamLike:
    """Adam over every weight with gradients of random numbers that keep a direction for a while, as real ones do."""

    def __init__(self, masters, lr, seed=1):
        self.masters, self.lr, self.step_number = masters, lr, 0
        self.random = np.random.default_rng(seed)
        self.m = {name: np.zeros_like(w) for name, w in masters.items()}
        self.v = {name: np.zeros_like(w) for name, w in masters.items()}
        # A fixed part of the gradient: without one Adam's steps would average out.
        self.drift = {name: self.random.standard_normal(w.size, np.float32) for name, w in masters.items()}

    def step(self):
        beta1, beta2, eps = np.float32(0.9), np.float32(0.999), np.float32(1e-8)
        self.step_number += 1
        correct1 = np.float32(1 - 0.9**self.step_number)
        correct2 = np.float32(1 - 0.999**self.step_number)
        for name, weight in self.masters.items():
            gradient = np.float32(1e-3) * (self.drift[name] + 2 * self.random.standard_normal(weight.size, np.float32))
            m, v = self.m[name], self.v[name]
            m += (1 - beta1) * (gradient - m)
            v += (1 - beta2) * (gradient * gradient - v)
            weight -= np.float32(self.lr) * (m / correct1) / (np.sqrt(v / correct2) + eps)
        return {}

    def weights(self):
        return self.masters


class FineTune:
    """Contrastive fine-tuning of a sentence encoder (an AutoModel) on the CPU."""

    def __init__(self, source, sentences, lr, names, seed=1):
        import torch
        from transformers import AutoModel, AutoTokenizer
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        torch.manual_seed(seed)
        self.torch = torch
        self.sentences = sentences
        self.random = np.random.default_rng(seed)
        self.tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True)
        self.model = AutoModel.from_pretrained(source, local_files_only=True, dtype=torch.float32)
        self.model.train()  # dropout makes the two views of a sentence
        self.parameters = {name: p for name, p in self.model.named_parameters() if name in names}
        if not self.parameters:
            raise RuntimeError("the model's parameters do not have the names of its file")
        self.optimizer = torch.optim.AdamW(self.parameters.values(), lr=lr)

    def embed(self, batch):
        hidden = self.model(**batch).last_hidden_state
        mask = batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)
        return self.torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)

    def step(self):
        chosen = self.random.choice(len(self.sentences), size=min(16, len(self.sentences)), replace=False)
        batch = self.tokenizer([self.sentences[i] for i in chosen], padding=True, truncation=True, max_length=48,
                               return_tensors="pt")
        scores = self.embed(batch) @ self.embed(batch).T / 0.05
        loss = self.torch.nn.functional.cross_entropy(scores, self.torch.arange(len(chosen)))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return {"loss": float(loss.detach())}

    def weights(self):
        return {name: p.detach().numpy().reshape(-1) for name, p in self.parameters.items()}


def sentences_of_docs():
    root = pathlib.Path(__file__).resolve().parents[1]
    text = "\n".join(p.read_text() for p in [root / "README.md", *sorted((root / "docs").glob("*.md"))] if p.exists())
    text = re.sub(r"```.*?```", " ", text, flags=re.S)
    sentences = [" ".join(s.split()) for s in re.split(r"(?<=[.:;])\s+|\n\s*\n|\n[-|#*]", text)]
    sentences = sorted({s for s in sentences if 30 <= len(s) <= 400})
    return sentences


def pick_method(wanted):
    if wanted == "adam-like":
        return wanted, "asked for"
    try:
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except Exception as error:  # a broken install is as good as none, but is named
        if wanted == "fine-tune":
            sys.exit(f"make_versions: fine-tuning needs torch and transformers: {error}")
        return "adam-like", f"torch and transformers cannot be imported ({type(error).__name__}: {error})"
    return "fine-tune", "torch and transformers are there"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, type=pathlib.Path)
    parser.add_argument("--out", required=True, type=pathlib.Path)
    parser.add_argument("--versions", type=int, default=10)
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--method", choices=("auto", "fine-tune", "adam-like"), default="auto")
    args = parser.parse_args()

    tensors = read_safetensors(args.model / "model.safetensors")
    masters = {}
    for name, (dtype, _, data) in tensors.items():
        values = to_float32(dtype, data)
        if values is not None:
            masters[name] = values.copy()

    method, reason = pick_method(args.method)
    print(f"make_versions: {method}: {reason}", flush=True)
    if method == "fine-tune":
        sentences = sentences_of_docs()
        if len(sentences) < 16:
            sys.exit("make_versions: too few sentences in README.md and docs/ to fine-tune on")
        trainer = FineTune(args.model, sentences, args.lr, set(masters))
        print(f"make_versions: AdamW, lr {args.lr:g}, contrastive loss over {len(sentences)} sentences", flush=True)
    else:
        trainer = AdamLike(masters, args.lr)
        print(f"make_versions: gradients are random numbers, the weights are real; lr {args.lr:g}", flush=True)

    shutil.rmtree(args.out, ignore_errors=True)
    before = None
    for version in range(args.versions):
        notes = trainer.step() if version > 0 else {}
        masters.update(trainer.weights())
        now = {name: ("BF16", shape, to_bf16(masters[name])) if name in masters else (dtype, shape, data)
               for name, (dtype, shape, data) in tensors.items()}
        folder = args.out / f"step_{version:02d}"
        folder.mkdir(parents=True)
        write_safetensors(folder / "model.safetensors", now)
        for other in sorted(args.model.iterdir()):
            if other.suffix in (".json", ".txt") and other.is_file():
                shutil.copyfile(other, folder / other.name)
        if before is not None:
            changed = sum(int(np.count_nonzero(np.frombuffer(now[n][2], np.uint16) != np.frombuffer(before[n][2], np.uint16)))
                          for n in masters)
            total = sum(w.size for w in masters.values())
            notes = {"changed": f"{100 * changed / total:.3f}%", **{k: f"{v:.4f}" for k, v in notes.items()}}
        before = now
        print(f"make_versions: {folder.name} " + " ".join(f"{k} {v}" for k, v in notes.items()), flush=True)


if __name__ == "__main__":
    main()
