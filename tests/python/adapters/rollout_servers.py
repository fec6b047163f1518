"""Rollout servers for tests: real HTTP, the routes of vLLM or SGLang, and one Receiver that takes what they commit."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import deltasync


class RolloutServer:
    """``calls`` has each route that was asked, in order, with its query and body; ``fail`` maps a route to an answer
    (status, text) that it gives once, before it does anything; ``lose`` has routes whose answer is lost once."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.fail: dict[str, tuple[int, str]] = {}
        self.lose: set[str] = set()
        self.receiver: deltasync.Receiver | None = None
        self.paused = False
        self.label = "default"
        self.adapters: dict[str, str] = {}  # of LoRA: by name, where from
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                cards = [{"id": name, "root": path} for name, path in outer.adapters.items()]
                self.reply(200, {"data": cards} if self.path == "/v1/models" else {"model_path": "/models/served"})

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                split = urlsplit(self.path)
                given = json.loads(body) if body else {}
                query = {key: value[0] for key, value in parse_qs(split.query).items()}
                outer.calls.append((split.path, query | given))
                if split.path in outer.fail:
                    self.reply(*outer.fail.pop(split.path))
                    return
                try:
                    answer = outer.handle(split.path, given)
                    if split.path in outer.lose:
                        outer.lose.remove(split.path)
                        self.reply(504, "the answer is lost")
                    else:
                        self.reply(200, answer)
                except Exception as error:
                    self.reply(500, {"error": str(error)})

            def reply(self, status: int, answer: Any) -> None:
                data = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def handle(self, path: str, given: dict[str, Any]) -> dict[str, Any]:
        if path in ("/pause", "/pause_generation"):
            self.paused = True
        elif path in ("/resume", "/continue_generation"):
            self.paused = False
        elif path == "/init_weight_transfer_engine":
            info = given["init_info"]
            self.receiver = deltasync.Receiver(info["agent"], token_file=info.get("token_file"), tls=info.get("tls"))
        elif path == "/start_weight_update":
            if self.receiver is None:
                raise RuntimeError("deltasync is not initialised: POST /init_weight_transfer_engine first")
        elif path == "/update_weights":
            assert self.paused and self.receiver is not None
            info = given["update_info"]
            self.receiver.update(info["version"], timeout=info["deadline_ms"] / 1000)
        elif path == "/load_lora_adapter":
            assert self.paused and given["lora_name"] not in self.adapters
            self.adapters[given["lora_name"]] = given["lora_path"]
        elif path == "/unload_lora_adapter":
            assert self.paused
            del self.adapters[given["lora_name"]]
        elif path == "/finish_weight_update":
            self.label = given.get("weight_version", self.label)
        return {"success": True, "message": "ok"}

    @property
    def routes(self) -> list[str]:
        return [path for path, _ in self.calls]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        if self.receiver is not None:
            self.receiver.close()
