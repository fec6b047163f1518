"""The versions that a trainer of the tests makes: the same in every process."""

import functools

import torch
from checkpoints import shapes
from engine_support import dtype_of


@functools.cache
def first(model):
    generator = torch.Generator().manual_seed(7)
    named = shapes(model)
    return {
        name: (torch.randn(shape, generator=generator) / 8).to(dtype_of(name, named)) for name, shape in named.items()
    }


@functools.cache
def weights(model, number):
    """Name to tensor, of version `number` (from 1); each changes 1 % of the elements of every tensor by bits."""
    if number == 1:
        return first(model)
    generator = torch.Generator().manual_seed(number)
    made = {}
    for name, tensor in weights(model, number - 1).items():
        bits = tensor.clone().view(torch.int16)
        mask = torch.rand(bits.shape, generator=generator) < 0.01
        flips = torch.randint(0, 128, bits.shape, generator=generator, dtype=torch.int16)
        made[name] = torch.where(mask, bits ^ flips, bits).view(tensor.dtype)
    return made
