"""deltasync inside of rollout engines. docs/guides/vllm.md is the page for their users.

``session`` is what the engines share: a receiver beside a model, fed by the model's own loader. ``vllm_*`` and
``sglang_*`` are imported by their engine's plug-in mechanism; nothing here imports an engine, nor torch.
"""
