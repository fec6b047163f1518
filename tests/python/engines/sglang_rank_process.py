"""One rank of a SGLang replica without its forward pass: real hook registry, real SchedulerWeightUpdaterManager, real
WeightUpdater, a real model (and one more as a draft's, if asked), driven by lines of JSON.

Usage: sglang_rank_process.py MODEL RANKS RANK PORT [draft] [ep]; answers lines of {"do": NAME, ...}.
"""

import contextlib
import json
import pathlib
import sys
import tempfile
import types

import sglang_model
import torch
from checkpoints import write_config
from sglang_versions import weights
from trace_rank import differing, memory


class Rank:
    def __init__(self, name, ranks, rank, port, draft, experts_parallel):
        from deltasync.engines import sglang_plugin
        from sglang.srt.plugins import load_plugins

        self.name, self.ranks, self.rank = name, ranks, rank
        with tempfile.TemporaryDirectory() as directory:
            write_config(name, pathlib.Path(directory))
            model, _ = sglang_model.build(directory, ranks, rank, port, experts_parallel=experts_parallel)
            self.models = {"target": model}
            if draft:
                self.models["draft"] = share_ends(sglang_model.initialize_again(), model)
        self.plugin = sglang_plugin
        load_plugins()  # as every process of a server does: by the entry point
        self.flushes, self.versions, self.running = 0, [], 0
        self.manager = self.make_manager()
        self.client = None

    def make_manager(self):
        from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

        runners = {role: types.SimpleNamespace(weight_updater=self.updater(role)) for role in self.models}
        target = types.SimpleNamespace(
            weight_update_runners=lambda: [("target", runners["target"])],
            model_runner=types.SimpleNamespace(model=self.models["target"]),
        )
        draft = None
        if "draft" in runners:
            draft = types.SimpleNamespace(weight_update_runners=lambda: [("draft", runners["draft"])])
        return SchedulerWeightUpdaterManager(
            tp_worker=target,
            draft_worker=draft,
            memory_saver_adapter=types.SimpleNamespace(pause=lambda tag: None, resume=lambda tag: None),
            flush_cache=self.flush,
            is_fully_idle=lambda **_: True,
            scheduler=types.SimpleNamespace(
                record_weight_version_change=lambda new_version: self.versions.append(new_version),
                _engine_paused=True,
            ),
        )

    def updater(self, role):
        from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

        return WeightUpdater(
            tp_rank=self.rank,
            device="cpu",
            gpu_id=0,
            model_config=types.SimpleNamespace(dtype=torch.bfloat16, model_path="/models/served"),
            custom_weight_loaders={},
            get_model=lambda: self.models[role],
            update_model_fields=lambda *args, **kwargs: None,
            recapture_cuda_graph=lambda: None,
            get_model_runner=lambda: None,
        )

    def flush(self, empty_cache=True):
        self.flushes += not self.running
        return not self.running

    def request(self, version, manifest=None):
        from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

        return UpdateWeightFromDiskReqInput(
            model_path="/models/served", load_format="deltasync", weight_version=version, manifest=manifest
        )

    # What lines may ask for.

    def update(self, version, manifest=None):
        answer = self.manager.update_weights_from_disk(self.request(version, manifest))
        return {"success": answer.success, "message": answer.message}

    def http(self, body):
        """Over the real application, up to the tokenizer's process."""
        from fastapi.testclient import TestClient
        from sglang.srt.entrypoints import http_server

        async def update(request_object, request):
            answer = self.manager.update_weights_from_disk(request_object)
            return answer.success, answer.message, answer.num_paused_requests

        http_server._global_state = types.SimpleNamespace(
            tokenizer_manager=types.SimpleNamespace(update_weights_from_disk=update)
        )
        http_server.app.server_args = types.SimpleNamespace(api_key=None, admin_api_key=None)
        answer = TestClient(http_server.app).post("/update_weights_from_disk", json=body)
        return {"status": answer.status_code, **answer.json()}

    def state(self):
        return {"flushes": self.flushes, "versions": self.versions, "path": self.manager_path()}

    def manager_path(self):
        return self.updater("target").model_config.model_path

    def compare(self, number, role="target"):
        """Names of live tensors that differ from what the engine's loader makes of a version."""
        model = self.models[role]
        found = memory(model)
        with restored(model):
            model.load_weights(weights(self.name, number).items())
            expected = memory(model)
        return {"differing": differing(found, expected)}

    def remember(self):
        self.remembered = {role: memory(model) for role, model in self.models.items()}
        return {}

    def changed(self):
        return {role: differing(self.remembered[role], memory(model)) for role, model in self.models.items()}

    def targets(self):
        return {
            target.role: {
                "state": target.receiver.state,
                "version": target.receiver.version.number if target.receiver.version else None,
                "mode": target.report.mode if target.report else None,
                "direct": target.report.direct if target.report else None,
                "reloaded": target.report.reloaded if target.report else None,
            }
            for target in self.plugin.rank_of(self.manager).targets
        }

    def fail_next_commit(self, role="target"):
        (target,) = [one for one in self.plugin.rank_of(self.manager).targets if one.role == role]
        commit = target.receiver.commit

        def fail(*args, **kwargs):
            target.receiver.commit = commit
            raise OSError("the device is lost")

        target.receiver.commit = fail
        return {}

    def lose_store(self, at):
        """The store of the votes breaks once, when the verdict of rounds with that name is written."""
        group = self.plugin.rank_of(self.manager)._group()
        store = group._store

        class Lost:
            def __getattr__(self, name):
                return getattr(store, name)

            def compare_set(self, key, expected, value):
                if not key.endswith(f"/{at}/verdict"):
                    return store.compare_set(key, expected, value)
                group._store = store
                raise RuntimeError("connection reset by peer")

        group._store = Lost()
        return {}

    def fail_next_load(self):
        """The engine's loader fails half-way, once; tracing, which calls it first, is over by then."""
        (target,) = self.plugin.rank_of(self.manager).targets
        reload = target.receiver.loader.reload

        def fail(weights):
            target.receiver.loader.reload = reload
            self.models["target"].load_weights(list(weights)[:3])
            raise OSError("the loader broke")

        target.receiver.loader.reload = fail
        return {}

    def damage_next(self):
        """Somebody else writes a bit before the next commit is attested."""
        (target,) = self.plugin.rank_of(self.manager).targets
        receiver = target.receiver._receiver
        attest = receiver.attest

        def damaged(timeout):
            receiver.attest = attest
            self.models["target"].get_parameter("model.norm.weight").data.view(torch.int16)[3] ^= 1
            return attest(timeout=timeout)

        receiver.attest = damaged
        return {}

    def wait_staged(self):
        """The number of the version that was pulled in the background."""
        (target,) = self.plugin.rank_of(self.manager).targets
        return {"number": target.receiver._following.wait(60).version.number}

    def run_requests(self, count):
        self.running = count
        return {}

    def forbid(self, reason):
        self.models["target"]._derived_weight_cache_error = reason
        return {}

    def cache_mode(self, mode):
        from sglang.srt.runtime_context import get_context

        get_context().override("test", weight_cache_mode=mode)
        return {}

    def tags(self, tags):
        self.manager.offload_tags.clear()
        self.manager.offload_tags.update(tags)
        return {}

    def wake(self):
        """A release of the weights without a backup, and other bytes at the same place."""
        self.plugin.rank_of(self.manager).sleeps(self.plugin._is_backed_up)
        with torch.no_grad():
            for parameter in self.models["target"].parameters():
                parameter.fill_(1.0)
        self.manager.offload_tags.clear()
        self.plugin.rank_of(self.manager).woke(self.plugin._is_backed_up)
        return {}

    def begin_session(self):
        from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput

        return {"success": self.manager.begin_weight_update(BeginWeightUpdateReqInput()).success}

    def end_session(self):
        from sglang.srt.managers.io_struct import EndWeightUpdateReqInput

        return {"success": self.manager.end_weight_update(EndWeightUpdateReqInput()).success}

    def runner_alone(self):
        success, message = self.updater("target").update_weights_from_disk("/models/served", "deltasync")
        return {"success": success, "message": message}

    def close(self):
        self.plugin.rank_of(self.manager).close()
        return {}


def share_ends(draft, target):
    """As drafts that predict several tokens are: embedding and head are the target's, and not the loader's affair."""
    draft.set_embed_and_head(*target.get_embed_and_head())
    load = draft.load_weights
    draft.load_weights = lambda weights: load(
        (name, weight) for name, weight in weights if not name.endswith(("embed_tokens.weight", "lm_head.weight"))
    )
    return draft


@contextlib.contextmanager
def restored(model):
    """What the block does to the parameters is undone."""
    with torch.no_grad():
        before = [(tensor, tensor.clone()) for tensor in [*model.parameters(), *model.buffers()]]
        yield
        for tensor, copy in before:
            tensor.copy_(copy)


def main():
    name, ranks, rank, port, *rest = sys.argv[1:]
    answers = sys.stdout
    sys.stdout = sys.stderr
    self = Rank(name, int(ranks), int(rank), int(port), "draft" in rest, "ep" in rest)
    print("READY", file=answers, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = getattr(self, command.pop("do"))(**command)
        except Exception as error:
            answer = {"raised": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
