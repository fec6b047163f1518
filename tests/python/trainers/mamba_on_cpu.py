"""What Megatron's Mamba layers call of the package mamba_ssm, which needs a GPU: the same sums, one step after the
other."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F


class GatedNorm(torch.nn.Module):
    """Of each group."""

    def __init__(
        self, size: int, eps: float, group_size: int, norm_before_gate: bool, device: Any = None, dtype: Any = None
    ) -> None:
        super().__init__()
        assert not norm_before_gate
        self.weight = torch.nn.Parameter(torch.ones(size, dtype=dtype))
        self._eps, self._group = eps, group_size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        groups = x.unflatten(-1, (-1, self._group))
        return F.rms_norm(groups, (self._group,), eps=self._eps).flatten(-2) * self.weight


def scan(
    projected: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor,
    dt_bias: torch.Tensor,
    a: torch.Tensor,
    *,
    D: torch.Tensor,
    headdim: int,
    ngroups: int,
    norm_before_gate: bool,
    **_: Any,
) -> torch.Tensor:
    """[batch, steps, gate|x|B|C|dt] to [batch, steps, x], gated. The norm follows."""
    heads, channels = len(a), len(conv_weight)
    inner = heads * headdim
    gate, mixed, dt = projected.split([inner, channels, heads], -1)
    steps = projected.shape[1]
    taps = conv_weight.shape[-1]
    kernel = conv_weight.view(channels, 1, taps)
    mixed = F.conv1d(mixed.transpose(1, 2), kernel, conv_bias, padding=taps - 1, groups=channels)
    mixed = F.silu(mixed[..., :steps].transpose(1, 2))
    states = (channels - inner) // 2
    x, b, c = mixed.split([inner, states, states], -1)
    x = x.unflatten(-1, (heads, headdim))
    b, c = (part.unflatten(-1, (ngroups, -1)).repeat_interleave(heads // ngroups, 2) for part in (b, c))
    dt = F.softplus(dt + dt_bias)
    state = torch.zeros(*x[:, 0].shape, b.shape[-1])
    out = []
    for step in range(steps):
        grown = (dt[:, step, :, None] * x[:, step])[..., None] * b[:, step, :, None, :]
        state = state * (dt[:, step] * a).exp()[..., None, None] + grown
        out.append((state * c[:, step, :, None, :]).sum(-1) + D[:, None] * x[:, step])
    return torch.stack(out, 1).flatten(2) * F.silu(gate)


_MODULES: dict[str, dict[str, Any]] = {
    "mamba_ssm": {},
    "mamba_ssm.ops": {},
    "mamba_ssm.ops.triton": {},
    "mamba_ssm.ops.triton.layernorm_gated": {"RMSNorm": GatedNorm},
    "mamba_ssm.ops.triton.ssd_combined": {
        "mamba_chunk_scan_combined": lambda: None,  # is not called
        "mamba_split_conv1d_scan_combined": scan,
    },
}


@contextlib.contextmanager
def instead_of_mamba_ssm() -> Iterator[None]:
    """For those that are imported here; others, as transformers, are to find nothing."""
    made = {name: types.ModuleType(name) for name in _MODULES}
    for name, members in _MODULES.items():
        vars(made[name]).update(members)
    with mock.patch.dict(sys.modules, made):
        yield
