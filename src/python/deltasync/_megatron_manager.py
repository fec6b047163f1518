"""What a WeightManager publishes of a model of Megatron."""

from __future__ import annotations

import logging
import secrets
from typing import Any

from . import _checks
from ._agreement import Agreement, common_store
from ._deadlines import left
from ._export_boxes import ExportedBox, Place, Run
from ._gather_plan import Whole
from ._gathered import BUCKET_BYTES, bucket_size, for_writing, require_same
from ._gathering import Gathering
from ._megatron_pieces import is_megatron
from ._slices import LocalRect
from .errors import InvalidArgument, LayoutMismatch
from .megatron import MODES, ExportPlan, plan, prove

_log = logging.getLogger("deltasync.trainer")


class Export:
    """Rectangles that each rank writes out of its own memory, and tensors that are gathered."""

    def __init__(self, made: ExportPlan, hf: str, prove: str, bucket_bytes: int, agreement: Agreement | None) -> None:
        self.plan, self._agreement = made, agreement
        self._hf, self._prove = hf, prove == "first"
        self._bucket_bytes = bucket_bytes
        self._wholes: list[Whole] = []

    def begin_call(self) -> None:
        """All ranks do, each time. come_together() follows, or fail()."""
        if self._agreement is not None:
            self._agreement.begin(["together"])

    def come_together(self, chunks: Any, about: str, end: float) -> None:
        """All ranks go on, to collectives of the trainer, which nobody may enter alone. The first time after a proof.
        InvalidArgument: `chunks` are others than the plan's, or its parameters are not as they were. LayoutMismatch:
        the first is not what the directory has. VersionConflict: another rank's call is `about` another version.
        """
        self.plan._group.begin_call()
        if chunks is not None and not self.plan._pieces.are_of(chunks):
            raise InvalidArgument(
                "offload: other model chunks than the manager was made with", "make a manager for them"
            )
        self.plan._pieces.check()  # before the ranks agree, so that all hear of it
        if self._agreement is not None:  # which, other than a collective, a rank may be late for
            self._agreement.require_same(about)
            self._agreement.agree("to offload", end)
        if self._prove:
            proof = prove(self.plan, self._hf, timeout=left(end))
            if not proof.identical:
                raise LayoutMismatch(str(proof), 'prove="off" if the run does not begin with the directory\'s weights')
            if proof.unproved and self.plan._group.rank == 0:
                _log.warning("the first offload: %s", proof)
            self._prove = False
        self._wholes = self.plan.gathered(left(end))

    def fail(self, error: BaseException) -> None:
        """All ranks fail in this call, unless they have agreed already."""
        if self._agreement is not None:
            self._agreement.fail(error)

    def gathering(self, end: float) -> Gathering | None:
        """Of what the plan's tensors() leave out, once all have agreed; None if that is nothing."""
        if not self._wholes:
            return None
        return for_writing(self.plan, self._wholes, self._bucket_bytes, lambda: left(end))

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
    """None unless it is a model of Megatron. InvalidArgument: of one, without `hf`; of another, with its options."""
    bucket_bytes = bucket_size(bucket_bytes)
    if export not in MODES:
        raise InvalidArgument(
            f"WeightManager: export={export!r:.40} is none of {', '.join(MODES)}",
            "another framework's generator is given to offload(), see docs/guides/megatron.md",
        )
    if prove not in ("first", "off"):
        raise InvalidArgument(f'prove={prove!r:.40} is neither "first" nor "off"')
    if not is_megatron(model, plain=hf is not None):
        if tables or ignored or export != "auto" or prove != "first" or bucket_bytes != BUCKET_BYTES:
            raise InvalidArgument(
                "WeightManager: tables=, ignored=, export=, prove= or bucket_bytes= beside a model that is none of "
                "Megatron's",
                "give the GPTModel, or the list of its chunks, and hf=",
            )
        return None
    if hf is None:
        raise InvalidArgument("WeightManager: a model of Megatron without hf=", "give the directory it began from")
    made = plan(model, hf, tables=tables, ignored=ignored, process_group=process_group, mode=export, timeout=timeout)
    group = made._group
    said = group.gather(lambda: [bucket_bytes, secrets.token_hex(8)], timeout)
    require_same([nbytes for nbytes, _ in said])
    name = f"trainer {said[0][1]}"
    agreement = Agreement(common_store(), group.rank, group.size, name) if group.size > 1 else None
    return Export(made, _checks.path("hf", hf), prove, bucket_bytes, agreement)
