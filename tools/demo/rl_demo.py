#!/usr/bin/env python3
"""Reinforcement learning with deltasync in the middle, small enough for two cores: a trainer process (AdamW, fp32
master weights) and a rollout process with a bf16 copy that generates (rl_demo_rollout.py). After every commit the
rollout's logits on fixed prompts must equal, bit for bit, those of the trainer's weights in bf16.

    rl_demo.py --out DIR [--steps 50] [--lr 1e-4]

The model is a Qwen3 decoder with random weights; nothing is downloaded. The reward is the share of even tokens. Each
step is GRPO's: groups of samples of one prompt, advantages within the group, one policy-gradient step on-policy.
Writes report.json, report.txt, plots.png and rl_demo_trace.json (for ui.perfetto.dev) to DIR. Exit code 1 if the
logits differ after any commit, or the reward does not rise.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import deltasync
import torch
from deltasync._programs import find
from rl_demo_report import plot, summarize
from rl_demo_rollout import GROUP, PROMPT_TOKENS, PROMPTS, Spans, logits_digest, make_model

SEED = 20
ANSWER_S = 120.0
CONFIG = {
    "vocab_size": 64,
    "hidden_size": 384,
    "intermediate_size": 1152,
    "num_hidden_layers": 2,
    "initializer_range": 0.08,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
}


class Rollout:
    """The other process: JSON lines both ways."""

    def __init__(self, endpoint: str, trace: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("rl_demo_rollout.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.tell({"endpoint": endpoint, "config": CONFIG, "seed": SEED, "trace": str(trace)})

    def tell(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        print(json.dumps(message), file=self._process.stdin, flush=True)

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"rl_demo: the rollout process ended with {self._process.wait(ANSWER_S)}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def end(self) -> dict[str, Any]:
        self.tell({"end": True})
        last = self.answer()
        self._process.wait(ANSWER_S)
        return last

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


def train_step(model: Any, optimizer: torch.optim.Optimizer, sampled: dict[str, Any]) -> None:
    """One GRPO step on-policy: the probability ratio is 1, so the clipped objective is the policy gradient."""
    tokens = torch.tensor(sampled["tokens"])
    rewards = torch.tensor(sampled["rewards"]).view(PROMPTS, GROUP)
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    logits = model(tokens[:, :-1]).logits[:, PROMPT_TOKENS - 1 :]
    chosen = torch.log_softmax(logits, -1).gather(-1, tokens[:, PROMPT_TOKENS:, None]).squeeze(-1)
    loss = -(advantages.view(-1, 1) * chosen).mean()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


@torch.no_grad()
def copy_as_bf16(master: Any, reference: Any) -> None:
    """torch's own cast of the master: what the rollout's weights are compared with."""
    for target, source in zip(reference.parameters(), master.parameters(), strict=True):
        target.copy_(source)


def run(args: argparse.Namespace, out: Path) -> list[dict[str, Any]]:
    torch.manual_seed(SEED)
    spans = Spans("trainer")
    model = make_model(CONFIG, torch.float32)
    reference = make_model(CONFIG, torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0)
    steps = []
    agent_trace = out / "trace_agent.json"
    with deltasync.WeightManager(
        model, dtype=torch.bfloat16, name=f"rl-demo-{time.time_ns()}", agent_args=["--trace", str(agent_trace)]
    ) as manager:
        rollout = Rollout(manager.endpoint, out / "trace_rollout.json")
        try:
            for step in range(1, args.steps + 1):
                began = time.monotonic()
                offloaded = manager.offload(version=step)
                with spans.span("reference logits", step):
                    copy_as_bf16(model, reference)
                    digest = logits_digest(reference, SEED)
                rollout.tell({"version": step, "digest": digest})
                answer = rollout.answer()
                trained = time.monotonic()
                with spans.span("train", step):
                    train_step(model, optimizer, answer)
                now = time.monotonic()
                record = {key: value for key, value in answer.items() if key not in ("tokens", "rewards")}
                record["step"] = step
                record["reward"] = sum(answer["rewards"]) / len(answer["rewards"])
                record["offload_s"] = offloaded.total_s
                record["train_s"] = now - trained
                record["step_s"] = now - began
                steps.append(record)
                if step % 10 == 0 or step == 1:
                    same = "identical" if record["identical"] else "DIFFER"
                    print(f"step {step}: reward {record['reward']:.3f}, logits {same}", flush=True)
            last = rollout.end()
            if last["wrong_tiles"]:
                raise SystemExit(f"rl_demo: {last['wrong_tiles']} tiles of live memory are not the last version's")
        finally:
            rollout.stop()
    spans.write(str(out / "trace_trainer.json"))
    return steps


def merge_traces(out: Path) -> Path:
    merged = out / "rl_demo_trace.json"
    parts = [str(out / f"trace_{name}.json") for name in ("trainer", "agent", "rollout")]
    subprocess.run(
        [str(find("deltasync")), "trace", *parts, "-o", str(merged)], check=True, stdout=subprocess.DEVNULL, timeout=60
    )
    return merged


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--lr", type=float, default=1e-4)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    began = time.monotonic()
    steps = run(args, args.out)
    trace = merge_traces(args.out)
    summary, text = summarize(steps, args.lr, time.monotonic() - began)
    (args.out / "report.json").write_text(json.dumps({"summary": summary, "steps": steps}, indent=1) + "\n")
    (args.out / "report.txt").write_text(text)
    plot(steps, json.loads(trace.read_text()), args.out / "plots.png")
    print(text, end="")
    print(f"{args.out}/: report.json, plots.png, {trace.name} (open it in ui.perfetto.dev)")
    return 0 if summary["logits_identical"] == len(steps) and summary["reward_rose"] else 1


if __name__ == "__main__":
    sys.exit(main())
