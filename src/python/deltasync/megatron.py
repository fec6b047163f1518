"""Megatron's models as HuggingFace checkpoints have them, in any parallel layout::

    plan = deltasync.megatron.plan(model_chunks, "Qwen3-30B-A3B")
    proof = deltasync.megatron.prove(plan, "Qwen3-30B-A3B")  # before the first step
    assert proof.identical, proof

All ranks call each function. Which elements a rank holds is what ``sharded_state_dict()`` says; what they are called in
a checkpoint says the family's page (:mod:`deltasync.families`). What is written, in which shapes and dtypes, is what
the model directory has that the run began from.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from . import _checks, _native
from ._agreement import all_together
from ._deadlines import seconds
from ._export_boxes import ExportedBox, Place, places, worth_it
from ._export_quantise import Scheme, quantise
from ._export_regions import QuantisedRegion, Region, regions
from ._gather_plan import Form, Whole, wholes_of
from ._gathered import export_hf_named_params
from ._group import Group
from ._hf_files import HfFiles
from ._megatron_fsdp import rows_of
from ._megatron_pieces import RankPieces, rows_here
from ._megatron_proof import Difference, ProofReport, prove
from ._native import Family, Layout, Sidecar, TensorSpec
from .coverage import some
from .errors import InvalidArgument, IoError, LayoutMismatch, Unsupported
from .families import read_page

__all__ = ["Difference", "ExportPlan", "ProofReport", "export_hf_named_params", "hf_weight_metadata", "plan", "prove"]

MODES = ("direct", "gathered", "auto")

_log = logging.getLogger("deltasync.megatron")

#: For ranks that are all in one call to hear of each other.
_SHORT_S = 60.0
#: What peft calls the config of an adapter.
_ADAPTER = "adapter_config.json"


class ExportPlan:
    """Which of this rank's memory is which part of which tensor of the checkpoint. Made by :func:`plan`; it keeps the
    parameters alive, and finds them where they are."""

    def __init__(
        self,
        made: _native.ExportPlan,
        files: HfFiles,
        sidecar: Sidecar,
        pieces: RankPieces,
        group: Group,
        head_dim: int,
        mode: str,
        digest: str,
        wide: Collection[int] = (),
    ) -> None:
        """`wide`: indices of tensors whose values are not all of bf16."""
        #: What is exported: the model directory's tensors.
        self.layout: Layout = made.layout
        #: What the directory has beside their bytes.
        self.sidecar = sidecar
        #: As :func:`plan` was told.
        self.mode = mode
        #: The same for plans that are made of the same.
        self.digest = digest
        self._made = made
        self._files = files
        self._pieces = pieces
        self._group = group
        self._head_dim = head_dim
        self._mine = [copy for copy in made.copies if copy.rank == group.rank]
        self._places: list[Place | Region] | None = None
        #: Of each quantised tensor, by its index: the index of its scales, and how.
        self._quantised = {one.tensor: (one.scale, _scheme(one, self.layout)) for one in made.quantised}
        #: Tensors, by their index, that are made of a whole one in another form, where that is gathered.
        self._forms = {
            index: _form(self.layout, index, scale, scheme, "F32" if index in wide else "BF16")
            for index, (scale, scheme) in self._quantised.items()
        }
        self._wholes: list[Whole] = []

    def to_json(self) -> str:
        """What all ranks copy; the same on each. Its fields: docs/reference/export.md."""
        return self._made.to_json()

    def shards_json(self) -> str:
        """What this rank holds: one of the files of ``deltasync export-plan --shards``."""
        return json.dumps({"rank": self._group.rank, "pieces": self._pieces.described()})

    def report(self) -> dict[str, Any]:
        """Of all ranks: ``family``; ``tensors`` that are exported; ``rows`` (the page's row: how many copies it makes);
        ``quantised`` tensors, with the names of their scales; ``constants`` that are the directory's own; ``ignored``,
        the trainer's tensors that go nowhere."""
        return {
            "family": self._made.family,
            "tensors": len(self.layout),
            "rows": dict(Counter(copy.row for copy in self._made.copies)),
            "quantised": {name: scale for name, (scale, _) in self._schemes().items()},
            "constants": [self.layout[index].name for index in self._made.constants],
            "ignored": list(self._made.ignored),
        }

    def tensors(self) -> list[tuple[str, Any]]:
        """What this rank writes of a version out of its own memory: rectangles of tensors, which are views of its
        parameters, or are made of them when they are asked for. All ranks call it. Unsupported, if the mode is
        "direct": what only a whole tensor would tell."""
        self._divide()
        assert self._places is not None
        self._pieces.bring_up_to_date()
        views = [view if view.is_contiguous() else view.contiguous() for view in self._pieces.views()]
        specs = [tensor.spec for tensor in self.layout]
        made: list[tuple[str, Any]] = []
        for place in self._places:
            spec = specs[place.tensor]
            if isinstance(place, Place):
                made.append((spec.name, ExportedBox(spec.shape, views, place)))
                continue
            index, scheme = self._quantised[place.tensor]
            region = QuantisedRegion(place, spec.shape, views, scheme)
            made += region.boxes((spec.name, specs[index].name), specs[index].shape)
        if self._group.rank == 0:
            made += [(specs[index].name, self._constant(index)) for index in self._made.constants]
        return made

    def gathered(self, timeout: float = _SHORT_S) -> list[Whole]:
        """The other tensors. All ranks call it."""
        self._divide(timeout)
        return self._wholes

    def _divide(self, timeout: float = _SHORT_S) -> None:
        """What each rank writes itself, and what is gathered; once."""
        if self._places is not None:
            return
        found: list[list[Place | Region]] = []

        def divide() -> list[int]:
            placed, apart = self._find_places()
            found.append(placed)
            return apart

        said = self._group.gather_any(divide, timeout)
        gathered = set(itertools.chain.from_iterable(said))
        if self.mode == "gathered":
            gathered = set(range(len(self.layout)))
        gathered -= set(self._made.constants)
        if gathered:
            self._wholes = wholes_of(self.layout, self._made.copies, (), self._forms, gathered.__contains__)
        self._places = [place for place in found[0] if place.tensor not in gathered]

    def _find_places(self) -> tuple[list[Place | Region], list[int]]:
        """Of this rank's copies, and the tensors for which there are none."""
        if self.mode == "gathered":
            return [], []
        tensors = list(self.layout)
        found: list[Place | Region] = []
        apart = []
        for index, group in itertools.groupby(self._mine, key=lambda copy: copy.tensor):  # sorted so
            copies = list(group)
            most = {"most": worth_it(copies)} if self.mode == "auto" else {}
            try:
                here = places(copies, tensors[index].shape, tensors[index].name, **most)
                if index in self._quantised:
                    found += regions(here, tensors[index].shape, self._quantised[index][1], tensors[index].name)
                else:
                    found += here
            except Unsupported as error:
                if self.mode == "direct":
                    raise Unsupported(error.message, 'give mode="auto", or export="auto" to WeightManager') from error
                apart.append(index)
        return found, apart

    def _schemes(self) -> dict[str, tuple[str, Scheme]]:
        """Of quantised tensors, by name: their scales' name, and how."""
        return {
            self.layout[index].name: (self.layout[scale].name, scheme)
            for index, (scale, scheme) in self._quantised.items()
        }

    def _constant(self, index: int) -> Any:
        tensor = self.layout[index]
        return self._files.flat(tensor.name).view(tuple(tensor.shape))

    def __repr__(self) -> str:
        return f"<ExportPlan {self._made.family}, {len(self.layout)} tensors, {len(self._mine)} copies here>"


def plan(
    model_chunks: Any,
    hf: str | os.PathLike[str],
    *,
    tables: Iterable[str | os.PathLike[str]] = (),
    ignored: Iterable[str] = (),
    process_group: Any = None,
    mode: str = "direct",
    timeout: float = 300.0,
) -> ExportPlan:
    """How the tensors of the directory ``hf`` are made of what all ranks hold. Reads names and shapes, no weights.

    ``model_chunks``: what this rank trains: a GPTModel, or the list of its chunks, in whichever wrappers. Of modules
    that have no ``sharded_state_dict()`` the modules in them are asked, and the attributes of their own parameters:
    ``tensor_model_parallel``, ``partition_dim``, ``partition_stride`` or ``partition_sizes``. These do not tell which
    experts a rank has (refused), which layers of a pipeline (refused without ``layer_number``), what equal parts are
    made of (gated delta nets), nor that a parameter without them is a part. ``hf``: a
    directory of an adapter (``adapter_config.json``, which names the base model's directory) has a LoRA's tensors, and
    only these are exported.
    ``tables``: pages of your own, looked at before those that come along. ``ignored``: patterns of the trainer's
    tensors that are not exported. ``process_group``: by default all processes of torch.distributed, if there are any.
    Of all processes the plan makes a group of its own; a group of some is used as it is, and nothing else may use it
    while they export.
    ``mode``: what each rank writes of a version itself. "direct": all of it, out of its own memory. "gathered":
    nothing; tensors are put together on a rank that has most of them. "auto": what cannot be direct is gathered.
    ``timeout``: in seconds, until all ranks have called it. DeadlinePassed names those that have not; the next call is
    another one, of all.

    CoverageError: tensors of the trainer or of the directory that the page has no row for, or the ranks no element;
    names both sides. LayoutMismatch: the shapes are not those that the page makes. Unsupported: fp8 primary weights;
    attributes that say otherwise than the layer's ``sharded_state_dict()``.
    NotFound: no page for the architecture that ``config.json`` names.
    """
    timeout = seconds("megatron.plan", timeout)
    group = Group(default_group() if process_group is None else process_group)
    with all_together([group.global_rank(rank) for rank in range(group.size)], group.rank, "to plan", timeout):
        if mode not in MODES:
            raise InvalidArgument(f"megatron.plan: mode={mode!r:.40} is none of {', '.join(MODES)}")
        own = [read_page(table) for table in _listed("tables", tables)]
        unwanted = [_checks.text("ignored", pattern) for pattern in _listed("ignored", ignored)]
        directory = Path(_checks.path("hf", hf))
    here: list[tuple[RankPieces, str, Layout, Sidecar]] = []

    def mine() -> dict[str, Any]:
        layout, sidecar = _native.read_hf_directory(directory, 1)
        config = _config_of(directory)
        pieces = RankPieces(model_chunks, adapters=_is_of_adapter(directory), rows=rows)
        here.append((pieces, config, layout, sidecar))
        same = hashlib.sha256(repr([config, own, unwanted, layout.digest, mode]).encode()).hexdigest()
        return {"same": same, "pieces": pieces.described()}

    shares = group.gather_any(lambda: rows_here(model_chunks), timeout)
    rows = rows_of(shares, group.rank, {group.global_rank(number): number for number in range(group.size)})
    said = group.gather_any(mine, timeout)
    group = group.own()
    pieces, config, layout, sidecar = here[0]
    for rank, other in enumerate(said):
        if other["same"] != said[0]["same"]:
            raise LayoutMismatch(f"megatron.plan: rank {rank} has another hf=, tables=, ignored= or mode= than rank 0")
    shards = [json.dumps({"rank": rank, "pieces": other["pieces"]}) for rank, other in enumerate(said)]
    made = _native.plan_export([Family.parse(*page) for page in own], config, layout, shards, unwanted)
    digest = hashlib.sha256("\n".join([said[0]["same"], *shards]).encode()).hexdigest()
    files = HfFiles(directory, layout, sidecar)
    wide = set()
    if made.quantised:
        dtypes = [[piece["dtype"] for piece in other["pieces"]] for other in said]
        wide = {copy.tensor for copy in made.copies if copy.add or dtypes[copy.rank][copy.piece] != "BF16"}
    if made.constants and group.rank == 0:
        names = [layout[index].name for index in made.constants]
        _log.warning(
            "megatron.plan: the trainer does not have %d tensor(s), which stay as %s has them: %s",
            len(names),
            directory,
            some(names),
        )
    return ExportPlan(made, files, sidecar, pieces, group, _head_dim(config), mode, digest, wide)


def hf_weight_metadata(
    model_chunks: Any,
    hf: str | os.PathLike[str],
    *,
    tables: Iterable[str | os.PathLike[str]] = (),
    ignored: Iterable[str] = (),
    process_group: Any = None,
) -> list[TensorSpec]:
    """Names, dtypes and shapes of what an export of this model has, in its order. Touches no weights. Its arguments are
    those of :func:`plan`, and so is what it raises."""
    made = plan(model_chunks, hf, tables=tables, ignored=ignored, process_group=process_group)
    return [tensor.spec for tensor in made.layout]


def default_group() -> bool:
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()


def _listed(what: str, values: Any) -> list[Any]:
    if isinstance(values, (str, bytes, os.PathLike)) or not isinstance(values, Iterable):
        raise InvalidArgument(f"{what}: a list, not {values!r:.80}")
    return list(values)


def _config_of(directory: Path) -> str:
    """The text of config.json; of an adapter that of its base model, which may be quantised as adapters are not."""
    if not _is_of_adapter(directory):
        return _json_of(directory / "config.json", "it names the model's architecture")[0]
    if (directory / "config.json").exists():
        base = directory
    else:
        said = _json_of(directory / _ADAPTER, "")[1].get("base_model_name_or_path")
        base = directory / str(said or "")  # which is the path itself, if that is absolute
    config = _json_of(base / "config.json", f"put the base model's config.json beside {_ADAPTER}")[1]
    for told in (config, config.get("text_config")):
        if isinstance(told, dict):
            told.pop("quantization_config", None)
            told.pop("compression_config", None)
    return json.dumps(config)


def _is_of_adapter(directory: Path) -> bool:
    return (directory / _ADAPTER).exists()


def _json_of(file: Path, remedy: str) -> tuple[str, dict[str, Any]]:
    try:
        text = file.read_text(encoding="utf-8-sig")
        said = json.loads(text)
    except OSError as error:
        raise IoError(f"{file}: {error.strerror}", remedy) from error
    except ValueError as error:
        raise InvalidArgument(f"{file}: no JSON: {error}") from error
    if not isinstance(said, dict):
        raise InvalidArgument(f"{file}: no JSON object")
    return text, said


def _scheme(one: _native.QuantisedTensor, layout: Layout) -> Scheme:
    block = (one.block_rows, one.block_cols) if one.by_block else None
    return Scheme(block, layout[one.scale].dtype, one.powers_of_two)


def _form(layout: Layout, index: int, scale: int, scheme: Scheme, dtype: str) -> Form:
    shape, scale_shape = tuple(layout[index].shape), tuple(layout[scale].shape)

    def make(tensor: Any) -> tuple[Any, Any]:
        values = tensor.view(shape)
        codes, scales = quantise(lambda begin, end: values[begin:end], shape, scheme)
        return codes, scales.view(scale_shape)

    return Form(dtype, (index, scale), make)


def _head_dim(config: str) -> int:
    """For guesses; 0 if config.json does not say it."""
    said = json.loads(config)
    said = said.get("text_config") or said
    try:
        return int(said.get("head_dim") or said["hidden_size"] // said["num_attention_heads"])
    except (ArithmeticError, KeyError, TypeError, ValueError):
        return 0
