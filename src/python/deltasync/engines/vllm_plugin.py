"""The entry point ``vllm.general_plugins``: vLLM calls :func:`register` in each of its processes."""

from __future__ import annotations

import logging

BACKEND = "deltasync"


def register() -> None:
    """Makes ``--weight-transfer-config '{"backend":"deltasync"}'`` known to vLLM. Any number of times; the engine
    itself is imported when a worker asks for it. Never raises: vLLM would end the process."""
    try:
        from vllm.distributed.weight_transfer import WeightTransferEngineFactory

        if BACKEND not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(
                BACKEND, "deltasync.engines.vllm_engine", "DeltasyncWeightTransferEngine"
            )
        register_trainer()
    except Exception as error:
        logging.getLogger("deltasync.engines").warning(
            "this vLLM does not take deltasync as a weight transfer back end (0.28 or later is needed): %r", error
        )


def register_trainer() -> None:
    """Makes it known to ``WeightTransferTrainerFactory``, in a release of vLLM that has one."""
    from vllm.distributed import weight_transfer

    factory = getattr(weight_transfer, "WeightTransferTrainerFactory", None)
    if factory is not None and BACKEND not in factory._registry:
        factory.register_engine(BACKEND, "deltasync.engines.vllm_trainer", "DeltasyncTrainerWeightTransferEngine")
