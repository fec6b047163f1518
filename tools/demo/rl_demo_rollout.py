"""The rollout process of rl_demo.py: a bf16 copy of the model that samples, and is kept identical to the trainer's.

Reads a JSON object a line from stdin, and answers with one a line on stdout: first {"endpoint", "config", "seed",
"trace"}, then {"version", "digest"} a step; {"end": true} ends it. The digest is of the logits that the trainer's own
bf16 weights give on the fixed prompts.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from contextlib import contextmanager
from typing import Any

import deltasync
import torch
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

PROMPT_TOKENS, NEW_TOKENS = 8, 16
PROMPTS, GROUP = 4, 12


class Spans:
    """What this process's Python does, beside the spans that the library records; timeline.md has the format."""

    def __init__(self, process: str) -> None:
        self._events: list[dict[str, Any]] = []
        deltasync.start_timeline(process)

    @contextmanager
    def span(self, name: str, version: int):
        began = time.monotonic_ns()
        yield
        took = time.monotonic_ns() - began
        self._events.append({"ph": "X", "name": name, "ts": began / 1e3, "dur": took / 1e3, "args": {"step": version}})

    def write(self, file: str) -> None:
        deltasync.write_timeline(file)
        with open(file) as trace:
            record = json.load(trace)
        pid = record["deltasync"]["processes"][0]["pid"]
        record["traceEvents"].append(
            {"ph": "M", "name": "thread_name", "pid": pid, "tid": 1, "args": {"name": "python"}}
        )
        record["traceEvents"] += [{**event, "cat": "python", "pid": pid, "tid": 1} for event in self._events]
        with open(file, "w") as trace:
            json.dump(record, trace)


def make_model(config: dict[str, Any], dtype: torch.dtype) -> Qwen3ForCausalLM:
    model = Qwen3ForCausalLM(Qwen3Config(**config, attn_implementation="eager"))
    return model.to(dtype).eval()


def prompts(seed: int, count: int, vocab: int) -> torch.Tensor:
    return torch.randint(0, vocab, (count, PROMPT_TOKENS), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits_digest(model: Qwen3ForCausalLM, seed: int) -> str:
    """Of all logits on the fixed prompts, bit by bit."""
    logits = model(prompts(seed, 4, model.config.vocab_size)).logits
    return hashlib.sha256(logits.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def rewards_of(tokens: torch.Tensor) -> torch.Tensor:
    """The toy's reward: the share of even tokens among those that were generated."""
    return (tokens[:, PROMPT_TOKENS:] % 2 == 0).float().mean(dim=1)


def main() -> None:
    torch.set_num_threads(1)
    start = json.loads(sys.stdin.readline())
    spans = Spans("rollout")
    torch.manual_seed(start["seed"] + 1)  # not the trainer's weights: every bit has to come over the wire
    model = make_model(start["config"], torch.bfloat16)
    generation = GenerationConfig(do_sample=True, max_new_tokens=NEW_TOKENS, eos_token_id=None, pad_token_id=0)
    receiver = deltasync.Receiver(start["endpoint"], module=model, background=True)
    for line in sys.stdin:
        asked = json.loads(line)
        if asked.get("end"):
            break
        step = asked["version"]
        report = receiver.commit(timeout=60)
        with spans.span("check logits", step):
            digest = logits_digest(model, start["seed"])
        began = time.monotonic()
        with spans.span("generate", step):
            torch.manual_seed(1000 + step)
            batch = prompts(10_000 + step, PROMPTS, model.config.vocab_size).repeat_interleave(GROUP, dim=0)
            tokens = model.generate(batch, attention_mask=torch.ones_like(batch), generation_config=generation)
        answer = {
            "version": report.version.number,
            "identical": digest == asked["digest"],
            "tokens": tokens.tolist(),
            "rewards": rewards_of(tokens).tolist(),
            "generate_s": time.monotonic() - began,
            "mode": report.mode,
            "changed": report.changed,
            "elements": receiver.layout.elements,
            "wire_bytes": report.wire_bytes,
            "full_bytes": report.full_bytes,
            "transfer_s": report.transfer_s,
            "commit_s": report.commit_s,
        }
        print(json.dumps(answer), flush=True)
    wrong = receiver.attest()
    receiver.close()
    spans.write(start["trace"])
    print(json.dumps({"wrong_tiles": len(wrong)}), flush=True)


if __name__ == "__main__":
    main()
