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
    """Whether `x` is for such an operation: on a CPU, in single or double precision. Everywhere else, under autocast
    and for the compiler, torch's own are better."""
    at_hand = x.device.type == "cpu" and x.dtype not in (torch.bfloat16, torch.float16)
    return at_hand and not (torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"))


def as_made(module: nn.Module, kind: type[nn.Module]) -> bool:
    """It is a `kind` and nothing else, nobody has given it a forward pass of its own, and no hook waits for it to be
    called: then it may be left uncalled, and its work done for it."""
    return (
        type(module) is kind
        and "forward" not in module.__dict__
        and not (module._forward_hooks or module._forward_pre_hooks)
        and not (module._backward_hooks or module._backward_pre_hooks)
    )


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
        self.buffers: dict[tuple[str, torch.dtype], Tensor] = {}
        self.views: dict[tuple[Any, ...], Tensor] = {}
        """The beginnings of buffers in the shapes that were asked for."""


_HELD = _Held()


def scratch(name: str, like: Tensor, *shape: int) -> Tensor:
    """Uninitialised memory on the CPU of the type of `like`, to be used up before the next of this `name` is asked for.

    A small one is the same memory every time, which a cache still holds: what is allocated anew lies wherever there
    was room between the activations.
    """
    if not is_real(like):
        return like.new_empty(shape)
    view = _HELD.views.get((name, like.dtype, shape))
    if view is not None:
        return view
    return _room(name, like.dtype, shape) if prod(shape) <= KEPT_FLOATS else like.new_empty(shape)


def _room(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    buffers, views = _HELD.buffers, _HELD.views
    count = prod(shape)
    with torch.inference_mode(False):  # it serves training, too
        too_small = (name, dtype) not in buffers or buffers[name, dtype].numel() < count
        if too_small:
            buffers[name, dtype] = torch.empty(count, dtype=dtype, device="cpu")
        if too_small or len(views) == MOST_VIEWS:
            views.clear()
        views[name, dtype, shape] = buffers[name, dtype][:count].view(shape)
    return views[name, dtype, shape]


def is_real(tensor: Tensor) -> bool:
    """It has memory. (Costs are counted with tensors that only have a shape.)"""
    return type(tensor) in (Tensor, nn.Parameter)
