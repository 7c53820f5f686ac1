"""What operations with a backward pass of their own have in common: where they are used, and their memory."""

import threading
from collections.abc import Callable
from functools import wraps
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

KEPT_FLOATS = 2**21
"""Up to here a tensor is small: keeping it costs less memory than making or finding room for it again costs time."""
MOST_VIEWS = 512
"""Shapes of buffers that are remembered: a model that writes a text asks for new ones with every token."""


def by_hand(x: Tensor) -> bool:
    """Whether `x` is for such an operation: on a CPU. Everywhere else, and for the compiler, torch's own are better."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """For a backward pass that cannot itself be differentiated: refuse it.

    With torch's own `once_differentiable`, `torch.autograd.grad` leaves out what it cannot reach, and says nothing.
    """

    @wraps(backward)
    def refusing(ctx: Any, *gradients: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError("on a CPU this model has first derivatives only: create_graph=True needs a GPU")
        return backward(ctx, *gradients)

    return refusing


class _Held(threading.local):
    def __init__(self) -> None:
        self.buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}
        self.views: dict[tuple[Any, ...], Tensor] = {}
        """The beginnings of buffers in the shapes that were asked for."""


_HELD = _Held()


def scratch(name: str, like: Tensor, *shape: int) -> Tensor:
    """An uninitialised tensor of the type of `like`, to be used up before the next of this `name` is asked for.

    A small one is the same memory every time, which a cache still holds: what is allocated anew lies wherever there
    was room between the activations.
    """
    if not is_real(like) or (count := prod(shape)) > KEPT_FLOATS:
        return like.new_empty(shape)
    buffer = name, like.dtype, like.device
    view = _HELD.views.get((buffer, shape))
    return _room(buffer, shape, count) if view is None else view


def _room(buffer: tuple[str, torch.dtype, torch.device], shape: tuple[int, ...], count: int) -> Tensor:
    buffers, views = _HELD.buffers, _HELD.views
    with torch.inference_mode(False):  # it serves training, too
        too_small = buffer not in buffers or buffers[buffer].numel() < count
        if too_small:
            buffers[buffer] = torch.empty(count, dtype=buffer[1], device=buffer[2])
        if too_small or len(views) == MOST_VIEWS:
            views.clear()
        views[buffer, shape] = buffers[buffer][:count].view(shape)
    return views[buffer, shape]


def is_real(tensor: Tensor) -> bool:
    """It has memory. (Costs are counted with tensors that only have a shape.)"""
    return type(tensor) in (Tensor, nn.Parameter)
