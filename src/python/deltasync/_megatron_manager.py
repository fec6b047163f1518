"""What a WeightManager publishes of a model of Megatron."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import _checks
from ._export_boxes import ExportedBox, Place, Run
from ._gather_plan import Whole
from ._gathered import bucket_size, for_writing, require_same
from ._gathering import Gathering
from ._megatron_pieces import is_megatron
from ._slices import LocalRect
from .errors import InvalidArgument, LayoutMismatch
from .megatron import MODES, ExportPlan, plan, prove


class Export:
    """Rectangles that each rank writes out of its own memory, and tensors that are gathered."""

    def __init__(self, made: ExportPlan, hf: str, prove: str, bucket_bytes: int) -> None:
        self.plan = made
        self._hf, self._prove = hf, prove == "first"
        self._bucket_bytes = bucket_bytes
        self._wholes: list[Whole] = []

    def tensors(self, chunks: Any, timeout: float) -> list[tuple[str, Any]]:
        """As ExportPlan.tensors(); the first time after a proof of at most `timeout` seconds. InvalidArgument: `chunks`
        are others than the plan's. LayoutMismatch: the first is not what the directory has."""
        if chunks is not None and not self.plan._pieces.are_of(chunks):
            raise InvalidArgument(
                "offload: other model chunks than the manager was made with", "make a manager for them"
            )
        if self._prove:
            proof = prove(self.plan, self._hf, timeout=timeout)
            if not proof.identical:
                raise LayoutMismatch(str(proof), 'prove="off" if the run does not begin with the directory\'s weights')
            self._prove = False
        self._wholes = self.plan.gathered()
        return self.plan.tensors()

    def gathering(self, left: Callable[[], float]) -> Gathering | None:
        """Of the tensors that tensors() leaves out, once it knows which; None if there are none."""
        return for_writing(self.plan, self._wholes, self._bucket_bytes, left) if self._wholes else None

    def gathered_here(self) -> list[tuple[int, LocalRect]]:
        """What this rank writes of those: tensors of the layout, and the rectangle."""
        here = [whole for whole in self._wholes if whole.home == self.plan._group.rank]
        outputs = [index for whole in here for index in (whole.form.outputs if whole.form else (whole.index,))]
        return [(index, rect) for index in outputs if (rect := self._rect(index)).rows]

    def box(self, index: int, tensor: Any) -> ExportedBox:
        """A gathered tensor, as what this rank writes of it."""
        rect = self._rect(index)
        place = Place(index, rect, (Run(0, 0, (rect.cols, 1)),), 0.0)
        return ExportedBox(self.plan.layout[index].shape, [tensor], place)

    def _rect(self, index: int) -> LocalRect:
        tensor = self.plan.layout[index]
        return LocalRect(0, 0, tensor.rows, tensor.cols, 0)


def export_of(
    model: Any,
    hf: Any,
    *,
    tables: Any,
    ignored: Any,
    prove: str,
    process_group: Any,
    export: Any,
    bucket_bytes: Any,
    timeout: float,
) -> Export | None:
    """None unless it is a model of Megatron. InvalidArgument: of one, without `hf`."""
    bucket_bytes = bucket_size(bucket_bytes)
    if export not in MODES:
        raise InvalidArgument(
            f"WeightManager: export={export!r:.40} is none of {', '.join(MODES)}",
            "another framework's generator is given to offload(), see docs/guides/megatron.md",
        )
    if not is_megatron(model):
        return None
    if prove not in ("first", "off"):
        raise InvalidArgument(f'prove={prove!r:.40} is neither "first" nor "off"')
    if hf is None:
        raise InvalidArgument("WeightManager: a model of Megatron without hf=", "give the directory it began from")
    made = plan(model, hf, tables=tables, ignored=ignored, process_group=process_group, mode=export, timeout=timeout)
    require_same(made._group.gather(lambda: bucket_bytes, timeout))
    return Export(made, _checks.path("hf", hf), prove, bucket_bytes)
