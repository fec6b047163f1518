"""What rl_demo.py found: numbers, text, and plots."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

#: Rewards are compared over so many steps at either end; it has to rise by this much.
ENDS, RISE = 10, 0.05

BLUE, ORANGE, GREEN, GREY = "#2b6cb0", "#dd6b20", "#2f855a", "#718096"
COLOURS = {"trainer": BLUE, "agent": ORANGE, "rollout": GREEN}


def summarize(steps: list[dict[str, Any]], lr: float, took_s: float) -> tuple[dict[str, Any], str]:
    """(what report.json has, what report.txt says)."""
    deltas = [step for step in steps if step["mode"] == "delta"]
    ends = min(ENDS, len(steps) // 2 or 1)
    first = statistics.fmean(step["reward"] for step in steps[:ends])
    last = statistics.fmean(step["reward"] for step in steps[-ends:])

    def middle(key: str) -> float:
        return statistics.median(step[key] for step in deltas) if deltas else 0.0

    elements, full = steps[0]["elements"], steps[0]["full_bytes"]
    summary = {
        "steps": len(steps),
        "lr": lr,
        "parameters": elements,
        "logits_identical": sum(step["identical"] for step in steps),
        "reward_first": first,
        "reward_last": last,
        "reward_rose": last > first + RISE,
        "deltas": len(deltas),
        "density_median": middle("changed") / elements,
        "wire_bytes_median": middle("wire_bytes"),
        "full_bytes": full,
        "offload_ms_median": 1e3 * middle("offload_s"),
        "transfer_ms_median": 1e3 * middle("transfer_s"),
        "commit_ms_median": 1e3 * middle("commit_s"),
        "took_s": took_s,
    }
    times = f"{full / max(summary['wire_bytes_median'], 1):.1f} times less than"
    text = f"""\
{len(steps)} steps, {elements / 1e6:.1f} M parameters, AdamW at {lr:g}, in {took_s:.0f} s
logits of the rollout identical to the trainer's after {summary["logits_identical"]} of {len(steps)} commits
reward {first:.3f} (first {ends} steps) -> {last:.3f} (last {ends})
updates: {len(deltas)} deltas, {len(steps) - len(deltas)} full; medians of the deltas:
  changed {100 * summary["density_median"]:.2f} % of the values
  {summary["wire_bytes_median"] / 1e3:.0f} kB on the wire, {times} the {full / 1e6:.1f} MB of the model
  offload {summary["offload_ms_median"]:.1f} ms, pull {summary["transfer_ms_median"]:.1f} ms, \
commit {summary["commit_ms_median"]:.1f} ms
"""
    return summary, text


def plot(steps: list[dict[str, Any]], trace: dict[str, Any], file: Path) -> None:
    """reward, density, bytes, milliseconds by step, and one update on the timeline, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    figure = plt.figure(figsize=(9, 7.6), layout="constrained")
    grid = figure.add_gridspec(3, 2, height_ratios=[1, 1, 1.25])
    x = [step["step"] for step in steps]
    deltas = [step for step in steps if step["mode"] == "delta"]
    xd = [step["step"] for step in deltas]

    axes = figure.add_subplot(grid[0, 0], title="reward: share of even tokens", xlabel="step")
    axes.plot(x, [step["reward"] for step in steps], color=GREEN, alpha=0.35, linewidth=1)
    axes.plot(x, _smooth([step["reward"] for step in steps]), color=GREEN, linewidth=2)

    axes = figure.add_subplot(grid[0, 1], title="values that changed, % of all", xlabel="step")
    axes.plot(xd, [100 * step["changed"] / step["elements"] for step in deltas], color=BLUE, marker=".", linewidth=1)
    axes.set_ylim(bottom=0)

    axes = figure.add_subplot(grid[1, 0], title="bytes of an update", xlabel="step")
    full = steps[0]["full_bytes"] / 1e6
    axes.axhline(full, color=GREY, linestyle="--", linewidth=1)
    axes.annotate(f"whole model, {full:.1f} MB", (x[-1], full), (0, -4), textcoords="offset points", color=GREY,
                  ha="right", va="top")
    axes.plot(xd, [step["wire_bytes"] / 1e6 for step in deltas], color=ORANGE, marker=".", linewidth=1)
    axes.set_ylabel("MB")
    axes.set_ylim(0, 1.1 * full)

    axes = figure.add_subplot(grid[1, 1], title="milliseconds of an update", xlabel="step", yscale="log")
    for key, name, colour in (
        ("offload_s", "offload", BLUE), ("transfer_s", "pull", ORANGE), ("commit_s", "commit", GREEN)
    ):
        axes.plot(xd, [1e3 * step[key] for step in deltas], color=colour, linewidth=1.2, label=name)
    axes.legend(frameon=False, ncols=3, fontsize=8)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("")

    axes = figure.add_subplot(grid[2, :])
    _timeline(axes, trace, xd[len(xd) // 2] if xd else x[0])
    figure.savefig(file, dpi=110)


def _smooth(values: list[float], width: int = 5) -> list[float]:
    return [statistics.fmean(values[max(0, i - width + 1) : i + 1]) for i in range(len(values))]


def _timeline(axes: Any, trace: dict[str, Any], step: int) -> None:
    """One version's spans, a row for each stage of each process."""
    names = {
        event["pid"]: event["args"]["name"].split()[0]
        for event in trace["traceEvents"]
        if event["ph"] == "M" and event["name"] == "process_name"
    }
    spans = [
        (names.get(event["pid"], "?"), event["name"], event["ts"] / 1e3, event["dur"] / 1e3)
        for event in trace["traceEvents"]
        if event["ph"] == "X" and _is_of(event["args"], step)
    ]
    begins = [begin for _, name, begin, _ in spans if name in ("offload", "guard")]
    wanted = ("copy", "seal", "overlapped diff", "diff", "pull", "commit", "reference logits", "check logits")
    spans = [span for span in spans if span[1] in wanted]
    if not begins:
        axes.set_axis_off()
        return
    zero = min(begins)
    rows: dict[tuple[str, str], int] = {}
    for process, name, begin, took in sorted(spans, key=lambda span: span[2]):
        row = rows.setdefault((process, name), len(rows))
        axes.barh(row, took, left=begin - zero, height=0.7, color=COLOURS.get(process, GREY))
    axes.set_yticks(range(len(rows)), [f"{process}: {name}" for process, name in rows])
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_title(f"one update on one clock (step {step}), ms since offload() was called")


def _is_of(args: dict[str, Any], step: int) -> bool:
    version = str(args.get("version", ""))
    return args.get("step") == step or version.rsplit(":", 1)[-1] == str(step)
