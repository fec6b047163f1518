"""One rank: vLLM's real Worker around a real model on the CPU, without forward steps; commands come as lines of JSON.

Usage: vllm_rank.py MODEL RANKS RANK PORT STAGES. A command is {"worker": METHOD, "args": [...]}, called on the Worker
as vLLM's executor would, or {"do": NAME, "args": [...]} for what is here; the answer is {"value": …} or {"error": …}.
"""

import json
import pathlib
import sys
import tempfile
import time
from types import SimpleNamespace

import torch
from checkpoints import shapes, write_config
from engine_support import change, first_version
from trace_rank import differing, memory
from vllm_model import build_with_config


class Rank:
    def __init__(self, name, ranks, rank, port, stages):
        from vllm.config.weight_transfer import WeightTransferConfig
        from vllm.distributed.weight_transfer import WeightTransferEngineFactory
        from vllm.plugins import load_general_plugins
        from vllm.v1.worker.gpu_worker import Worker

        torch.accelerator.synchronize = lambda *_: None
        torch.accelerator.get_memory_info = lambda *_: (1 << 30, 2 << 30)
        load_general_plugins()  # finds deltasync's entry point
        self.imported_early = "deltasync.engines.vllm_engine" in sys.modules
        self.name = name
        self.directory = tempfile.TemporaryDirectory()
        write_config(name, pathlib.Path(self.directory.name))
        self.model, self.load, config = build_with_config(self.directory.name, ranks, rank, port, stages=stages)
        config.weight_transfer_config = WeightTransferConfig(backend="deltasync")
        self.config = config
        worker = self.worker = Worker.__new__(Worker)
        worker.vllm_config, worker.rank, worker.device = config, rank, torch.device("cpu")
        worker.synchronize_device = lambda: None
        worker.model_config = config.model_config
        worker.speculative_config = SimpleNamespace(draft_model_config=config.model_config)
        self.draft = None
        self.lora_resets = 0
        worker.model_runner = SimpleNamespace(
            get_model=lambda: self.model,
            get_draft_model=lambda: self.draft,
            reset_lora_state=self.reset_lora_state,
            model=self.model,
        )
        worker._weight_update_active = worker._weight_update_is_draft = False
        worker._sleep_saved_buffers, worker._sleep_saved_parameters, worker._sleep_saved_draft_buffers = {}, {}, {}
        worker._sleep_mode_backend = SimpleNamespace(suspend=self.suspend, resume=lambda tags: None)
        worker.weight_transfer_engine = WeightTransferEngineFactory.create_engine(
            config.weight_transfer_config, config, worker.device, self.model
        )
        self.engine = worker.weight_transfer_engine
        self.snapshots = {}

    def reset_lora_state(self):
        self.lora_resets += 1

    def suspend(self, level):
        if level == 2:
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.fill_(float("nan"))

    # Commands.

    def facts(self):
        return {"imported_early": self.imported_early, "engine": type(self.engine).__name__}

    def state(self):
        receiver = self.engine._target
        return {
            "version": receiver.version.number if receiver and receiver.version else None,
            "state": receiver.state if receiver else None,
            "active": self.worker._weight_update_active,
            "report": self.engine.last_report and self.engine.last_report.mode,
            "reload": sorted(receiver.trace.reload) if receiver and receiver.trace else None,
            "placed": len(receiver.trace.placed) if receiver and receiver.trace else None,
            "addresses": [p.data_ptr() for p in self.model.parameters()],
            "meta": [n for n, p in self.model.named_parameters() if p.device.type == "meta"],
        }

    def wait_staged(self):
        """The number of the version that was pulled in the background."""
        return self.engine._target._following.wait(60).version.number

    def snapshot(self, key):
        self.snapshots[key] = memory(self.model)

    def unchanged(self, key):
        return differing(self.snapshots[key], memory(self.model))

    def underived(self):
        """Tensors of latent attention that are not what vLLM makes of kv_b_proj's live bytes; None if it has none."""
        from vllm.model_executor.layers.attention.mla_attention import split_kv_b_proj

        layers = {name: module for name, module in self.model.named_modules() if hasattr(module, "W_UK_T")}
        found = []
        for name, layer in layers.items():
            sizes = (layer.kv_lora_rank, layer.num_heads, layer.qk_nope_head_dim, layer.v_head_dim)
            keys, values = split_kv_b_proj(layer.kv_b_proj, torch.bfloat16, *sizes)
            for own, wanted in (("W_UV", values.transpose(0, 1)), ("W_UK_T", keys.permute(1, 2, 0))):
                live = getattr(layer, own).contiguous().view(torch.int16)
                if not torch.equal(live, wanted.contiguous().view(torch.int16)):
                    found.append(f"{name}.{own}")
        return found if layers else None

    def compare(self, last):
        """Loads versions 1..last by vLLM's own loader, and compares with the snapshots of these numbers."""
        self.engine.shutdown()
        weights = first_version(shapes(self.name))
        found = {}
        for number in range(1, last + 1):
            if number > 1:
                change(weights, number)
            self.load(weights.items())
            if number in self.snapshots:
                found[number] = differing(self.snapshots[number], memory(self.model))
        return found

    def refuse(self, what):
        """An option that vLLM was started with."""
        if what == "lora":
            self.config.lora_config = object()
        elif what == "eplb":
            self.config.parallel_config.enable_eplb = True
        elif what == "ipc_cache":
            self.config.load_config.load_format = "ipc_cache"
        else:
            self.config.lora_config, self.config.parallel_config.enable_eplb = None, False
            self.config.load_config.load_format = "dummy"

    def speculate(self, method):
        self.config.speculative_config = SimpleNamespace(method=method)

    def fail_next(self, what):
        """Makes this rank fail once: "stage", or "commit" after it was written."""
        receiver = self.engine._target
        method = {"stage": "prepare", "commit": "commit"}[what]
        real = getattr(receiver, method)

        def fails(*args, **options):
            setattr(receiver, method, real)
            if what == "commit":
                # As a device that fails at the end: the update is written, and rolled back by the session.
                synchronize = receiver.loader.synchronize
                calls = []

                def broken():
                    calls.append(1)
                    if len(calls) == 2:
                        receiver.loader.synchronize = synchronize
                        raise RuntimeError("the device was told to fail")

                receiver.loader.synchronize = broken
                return real(*args, **options)
            raise RuntimeError("staging was told to fail")

        setattr(receiver, method, fails)

    def lose_store(self, subject):
        """The store of the votes breaks once, when the verdict about something that ends so is written."""
        group = self.engine._group()
        store = group._store

        class Lost:
            def __getattr__(self, name):
                return getattr(store, name)

            def compare_set(self, key, expected, value):
                if "/vote/" in key:
                    self.hit = json.loads(value)["subject"].endswith(subject)
                elif self.hit:
                    group._store = store
                    raise RuntimeError("connection reset by peer")
                return store.compare_set(key, expected, value)

        group._store = Lost()

    def fail_next_load(self):
        """The engine's loader fails half-way, once."""
        loader = self.engine._target.loader
        reload = loader.reload

        def fail(weights):
            loader.reload = reload
            self.load(list(weights)[:3])
            raise OSError("the loader broke")

        loader.reload = fail

    def damage_next(self):
        """Somebody else writes a bit before the next commit is attested."""
        receiver = self.engine._target._receiver
        attest = receiver.attest

        def damaged(timeout):
            receiver.attest = attest
            self.model.get_parameter("model.norm.weight").data.view(torch.int16)[3] ^= 1
            return attest(timeout=timeout)

        receiver.attest = damaged

    def permute(self, path):
        """From now on that module keeps its rows in reverse order, as kernels' formats do."""
        module = self.model.get_submodule(path)
        method = type(module.quant_method).process_weights_after_loading

        class Permuting(type(module.quant_method)):
            def process_weights_after_loading(self, layer):
                method(self, layer)
                layer.weight.data.copy_(layer.weight.data.flip(0).clone())

        module.quant_method.__class__ = Permuting
        Permuting.__name__ = type(module.quant_method).__mro__[1].__name__

    def add_draft(self):
        """A draft model that has its own last layers and the target's embedding."""
        from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
        from vllm.model_executor.model_loader.weight_utils import default_weight_loader

        shared = self.model.model.embed_tokens

        class Draft(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.embed_tokens = shared
                self.norm = torch.nn.Parameter(torch.zeros(64, dtype=torch.bfloat16), requires_grad=False)

            def load_weights(self, weights):
                places = {"model.norm.weight": self.norm, "model.embed_tokens.weight": shared.weight}
                for name, tensor in weights:
                    if name in places:
                        place = places[name]
                        getattr(place, "weight_loader", default_weight_loader)(place, tensor)

        self.draft = Draft()
        record_metadata_for_reloading(self.draft)  # as vLLM does when it makes a model

    def draft_matches(self, last):
        weights = first_version(shapes(self.name))
        for number in range(2, last + 1):
            change(weights, number)
        bits = [t.contiguous().view(torch.int16) for t in (self.draft.norm.data, weights["model.norm.weight"])]
        placed = sorted(self.engine._draft.trace.placed)
        return {"equal": torch.equal(*bits), "placed": placed, "version": self.engine._draft.version.number}


def main(name, ranks, rank, port, stages):
    out = sys.stdout
    sys.stdout = sys.stderr
    served = Rank(name, int(ranks), int(rank), int(port), int(stages))
    print(json.dumps({"value": "ready"}), file=out, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        start = time.monotonic()
        try:
            if "worker" in command:
                value = getattr(served.worker, command["worker"])(*command["args"])
            else:
                value = getattr(served, command["do"])(*command["args"])
            answer = {"value": value}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer | {"seconds": time.monotonic() - start}), file=out, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
