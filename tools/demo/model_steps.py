"""Trainers whose weights stand for a real training's, and bf16 model directories of what they hold. Used by
make_versions.py, real_steps.py and tools/lab.py."""

import json
import pathlib
import re
import shutil
import struct

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
    root = pathlib.Path(__file__).resolve().parents[2]
    text = "\n".join(p.read_text() for p in [root / "README.md", *sorted((root / "docs").rglob("*.md"))] if p.exists())
    text = re.sub(r"```.*?```", " ", text, flags=re.S)
    sentences = [" ".join(s.split()) for s in re.split(r"(?<=[.:;])\s+|\n\s*\n|\n[-|#*]", text)]
    sentences = sorted({s for s in sentences if 30 <= len(s) <= 400})
    return sentences


def write_version(directory, tensors, masters, source=None):
    """A HF model directory: `masters` (flat arrays of fp32 by name) cast to bf16 in place of those of `tensors`
    (name → dtype, shape, bytes), and the side files of `source`. Returns what was written, as read_safetensors would.
    """
    now = {name: ("BF16", shape, to_bf16(masters[name])) if name in masters else (dtype, shape, data)
           for name, (dtype, shape, data) in tensors.items()}
    directory.mkdir(parents=True)
    write_safetensors(directory / "model.safetensors", now)
    for other in sorted(source.iterdir()) if source else ():
        if other.suffix in (".json", ".txt") and other.is_file():
            shutil.copyfile(other, directory / other.name)
    return now


def write_random_steps(directory, mib, versions, changed, tensors=8):
    """HF model directories step_0 and so on of random bf16 words of one magnitude; from each to the next that part of
    them changes. The same arguments write the same bytes."""
    random = np.random.default_rng(1)
    rows = max(1, (mib << 20) // 2 // tensors // 1024)
    weights = {f"layers.{i}.weight": random.integers(0x3C00, 0x3E00, (rows, 1024), np.uint16) for i in range(tensors)}
    for version in range(versions):
        step = directory / f"step_{version}"
        step.mkdir(parents=True)
        write_safetensors(step / "model.safetensors",
                          {name: ("BF16", words.shape, words.tobytes()) for name, words in weights.items()})
        (step / "config.json").write_text("{}")
        for words in weights.values():
            words ^= random.random(words.shape, np.float32) < changed
