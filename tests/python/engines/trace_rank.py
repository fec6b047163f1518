"""One rank of an engine: traces its loader, replays two versions and compares with what the loader makes of them.

Usage: trace_rank.py {vllm|sglang} MODEL RANKS RANK PORT {tp|ep}; prints one line of JSON.
"""

import importlib
import json
import pathlib
import sys
import tempfile
import time

import deltasync
import torch
from checkpoints import shapes, write_config
from deltasync.autoplacement import placement_plan, prove, replay, trace_loader, whole_leaves
from deltasync.autoplacement.memory import live_tensors
from engine_support import any_bits, dtype_of


def version(model, seed):
    """Random bits; every rank makes the same."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    named = shapes(model)
    for name, shape in named.items():
        made[name] = any_bits(shape, dtype_of(name, named), generator)
    return made


def memory(model):
    return {
        live.name: live.tensor.detach().flatten().contiguous().view(torch.uint8).clone()
        for live in live_tensors(model)
        if live.tensor.numel() and live.tensor.device.type != "meta"
    }


def differing(one, other):
    return sorted(name for name in one if not torch.equal(one[name], other[name]))


def main(engine, name, ranks, rank, port, mode):
    with tempfile.TemporaryDirectory() as directory:
        write_config(name, pathlib.Path(directory))
        build = importlib.import_module(f"{engine}_model").build
        model, load = build(directory, int(ranks), int(rank), int(port), experts_parallel=mode == "ep")
    first, second = version(name, 1), version(name, 2)
    untouched = memory(model)
    start = time.monotonic()
    found = trace_loader(model, load, [(key, value.dtype, value.shape) for key, value in first.items()])
    seconds = time.monotonic() - start
    report = {"changed_by_trace": differing(untouched, memory(model)), "trace_seconds": round(seconds, 3)}
    load(first.items())
    proved = prove(found, first.__getitem__)
    loaded = memory(model)
    load(second.items())
    expected = memory(model)
    load(first.items())
    report["loader_repeats"] = differing(loaded, memory(model))
    replay(proved, second)
    report["differing_after_replay"] = differing(expected, memory(model))
    report["current"] = proved.is_current(model)
    report["unproved"] = sorted(proved.reload.keys() - found.reload.keys())
    report["reload"] = {key: reload.reason for key, reload in found.reload.items()}
    report["unfilled"] = proved.unfilled
    report["unplaced"] = sorted(found.unplaced)
    report["leaves"] = len(whole_leaves(proved).placed)
    report["placed"] = len(proved.placed)
    report["slices"] = [(s.tensor, *s.rect) for s in proved.slices]
    layout, _ = deltasync.layout_of(first)
    placement = deltasync.Placement.build(layout, placement_plan(proved, ignore=proved.unplaced, reloads=True))
    report["placed_bytes"] = placement.placed_bytes
    print("REPORT " + json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
