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
import pathlib
import shutil
import sys

import numpy as np

from model_steps import AdamLike, FineTune, read_safetensors, sentences_of_docs, to_float32, write_version


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
        directory = args.out / f"step_{version:02d}"
        now = write_version(directory, tensors, masters, args.model)
        if before is not None:
            changed = sum(int(np.count_nonzero(np.frombuffer(now[n][2], np.uint16) != np.frombuffer(before[n][2], np.uint16)))
                          for n in masters)
            total = sum(w.size for w in masters.values())
            notes = {"changed": f"{100 * changed / total:.3f}%", **{k: f"{v:.4f}" for k, v in notes.items()}}
        before = now
        print(f"make_versions: {directory.name} " + " ".join(f"{k} {v}" for k, v in notes.items()), flush=True)


if __name__ == "__main__":
    main()
