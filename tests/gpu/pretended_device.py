"""A device that is not there: its tensors lie on the processor and say that they lie elsewhere.

Everything is really computed, so that whole steps can be made without a GPU. As on one, an
operation over tensors of both sides raises unless that of the processor has no dimensions, and
nothing reaches a tensor's memory (`numpy`) before it was copied to the processor. Left out: what is
a device's own, such as kernels, streams, graphs and lower precision chosen by autocast.

Registering the device cannot be undone and bears on all of torch, so this belongs into a process of
its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

NAME = "pretended"
_ATEN = torch.ops.aten
_TAKES_BOTH = {
    _ATEN.copy_.default,
    _ATEN.index.Tensor,
    _ATEN.index_put_.default,
    _ATEN._index_put_impl_.default,
}
"""What a real device takes tensors of the processor for."""


@contextmanager
def pretended_device() -> Iterator[torch.device]:
    """Within, this thread can compute on the device that is returned."""
    if not hasattr(torch, NAME):
        backend_registration._setup_privateuseone_for_python_backend(NAME)
    with _Operations(), _Constructors():
        yield torch.device(NAME, 0)


class PretendedTensor(Tensor):
    """A tensor of the device, whose content is ``held`` by the processor."""

    held: Tensor

    def __new__(cls, held: Tensor) -> Self:
        # In inference mode a view of what was made outside must be such a tensor as well.
        with torch.inference_mode(mode=False):
            made = Tensor._make_wrapper_subclass(
                cls,
                held.size(),
                strides=held.stride(),
                storage_offset=held.storage_offset(),
                dtype=held.dtype,
                device=torch.device(NAME, 0),
            )
        made.held = held
        return made

    def __repr__(self) -> str:
        return f"PretendedTensor({self.held!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copy: Tensor = PretendedTensor(self.held.clone())
        if isinstance(self, torch.nn.Parameter):
            copy = torch.nn.Parameter(copy, self.requires_grad)
        return memo.setdefault(id(self), copy)

    def tolist(self) -> Any:
        return self.held.tolist()

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.held.untyped_storage()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(func, args, kwargs or {})


class _Operations(TorchDispatchMode):
    """Sees those that make or move tensors as well, which no tensor of the device takes part in."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(func, args, kwargs or {})


class _Constructors(TorchFunctionMode):
    """Makes tensors of lists on the processor first: torch hides how it fills them from modes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.new_tensor:
            like, content = args
            return torch.tensor(content, dtype=like.dtype).to(like.device)
        if func is torch.tensor and kwargs.get("device") is not None:
            device = kwargs.pop("device")
            return torch.tensor(*args, **kwargs).to(device)
        return func(*args, **kwargs)


def _computed(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Compute on the processor; say that the result lies where it would."""
    inputs = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
    given = {id(t.held): t for t in inputs if isinstance(t, PretendedTensor)}
    is_elsewhere = bool(given)
    if kwargs.get("device") is not None:
        is_elsewhere = torch.device(kwargs["device"]).type == NAME
        kwargs = {**kwargs, "device": torch.device("cpu")}
    elif given and func not in _TAKES_BOTH:
        assert not [t for t in inputs if t.dim() and not isinstance(t, PretendedTensor)], (
            f"{func} of tensors of the processor and of the device"
        )
    found = func(*tree_map(_held, args), **tree_map(_held, kwargs))
    if not is_elsewhere:
        return found

    def wrapped(leaf: object) -> object:
        # What was changed in place is the very tensor that came in.
        is_new = isinstance(leaf, Tensor) and id(leaf) not in given
        return PretendedTensor(leaf) if is_new else given.get(id(leaf), leaf)

    return tree_map(wrapped, found)


def _held(leaf: object) -> object:
    return leaf.held if isinstance(leaf, PretendedTensor) else leaf
