"""A server of vLLM's real routes, model lists and LoRA slots, without a forward pass. vllm_lora_server.py MODEL PORT

Prints its URL. Beside vLLM's routes, GET /slot answers what the slot of one projection holds, its two matrices as
lists, and which paths were loaded."""

import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import torch
from vllm_model import build_with_config

MODEL, PORT = sys.argv[1], int(sys.argv[2])
RANK_MAX = 8


def build():
    """The model with slots, and who manages them."""
    from vllm.config import set_current_vllm_config
    from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

    options = {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 2, "max_lora_rank": RANK_MAX}
    model, _, config = build_with_config(MODEL, 1, 0, PORT, **options)
    with set_current_vllm_config(config):
        manager = LRUCacheWorkerLoRAManager(config, torch.device("cpu"), model.embedding_modules)
        return manager.create_lora_manager(model, config), manager, config


def app(model, manager, config):
    from fastapi import FastAPI
    from vllm.entrypoints.openai.models.api_router import router as models
    from vllm.entrypoints.openai.models.protocol import BaseModelPath
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels
    from vllm.entrypoints.rl.online.api_router import router as control
    from vllm.entrypoints.serve.lora.api_router import _attach_router

    class EngineClient:
        model_config, renderer, input_processor = config.model_config, None, None
        paused, loads = False, []

        async def add_lora(self, request):
            assert self.paused
            self.loads.append(request.lora_path)
            return manager.add_adapter(request)

        async def pause_generation(self, *, mode, clear_cache):
            assert (mode, clear_cache) == ("keep", True)
            self.paused = True

        async def resume_generation(self):
            self.paused = False

    made = FastAPI()
    _attach_router(made)
    made.include_router(models)
    made.include_router(control)
    made.state.engine_client = client = EngineClient()
    made.state.openai_serving_models = OpenAIServingModels(client, [BaseModelPath("base", MODEL)])
    made.state.args = SimpleNamespace()

    @made.get("/health")
    def health():
        return {}

    @made.get("/slot")
    def slot():
        layer = model.get_submodule("model.layers.0.self_attn.o_proj")
        return {
            "paused": client.paused,
            "loads": client.loads,
            "a": layer.lora_a_stacked[0][0, 0].float().tolist(),
            "b": layer.lora_b_stacked[0][0, 0].float().tolist(),
        }

    return made


def main():
    from fastapi.testclient import TestClient

    client = TestClient(app(*build()), raise_server_exceptions=False)

    class Handler(BaseHTTPRequestHandler):
        def forward(self):
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            answer = client.request(self.command, self.path, content=body, headers={"Content-Type": "application/json"})
            self.send_response(answer.status_code)
            self.send_header("Content-Length", str(len(answer.content)))
            self.end_headers()
            self.wfile.write(answer.content)

        do_GET = do_POST = forward

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(f"http://127.0.0.1:{server.server_address[1]}", flush=True)
    server.serve_forever()


main()
