"""What a step launches on a device, recorded on a CPU; anything that would wait for the device raises.

Kernels of Triton are recorded and not run, and memory that nothing was written to is zero: so a recording takes
milliseconds, and its numbers mean nothing.
"""

from __future__ import annotations

from contextlib import contextmanager

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

WAITING = {
    "_local_scalar_dense",
    "_unique2",
    "allclose",
    "argwhere",
    "bincount",
    "equal",
    "is_nonzero",
    "item",
    "masked_select",
    "nonzero",
    "nonzero_numpy",
    "repeat_interleave",
    "unique_consecutive",
    "unique_dim",
}
"""Operations whose results, or the shapes of whose results, are needed on the host."""
UPLOADING = {"lift_fresh"}
"""Operations that copy a number of the host's memory."""
DOWNLOADING = {Tensor.cpu, Tensor.numpy, Tensor.tolist, Tensor.__array__}
ALLOCATING = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


class WaitsForDevice(Exception):
    pass


class Launches(TorchDispatchMode):
    """The operations and kernels of a block, in order: names, shapes, numbers, and the addresses of tensors that the
    block did not make."""

    def __init__(self):
        super().__init__()
        self.found = []
        self._made = {}  # key: address of a tensor's memory; kept, so no address is used twice

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        name, named = operation.overloadpacket.__name__, kwargs or {}
        if name in WAITING or name in UPLOADING or _by_mask(name, args) or (name == "where" and len(args) == 1):
            raise WaitsForDevice(name)
        described = self._described((args, named))
        made = operation(*args, **named)
        results = [each for each in (made if isinstance(made, (tuple, list)) else [made]) if isinstance(each, Tensor)]
        new = [each for each in results if all(_address(each) != _address(other) for other in _tensors(args))]
        if name in ALLOCATING:
            made.zero_()
        elif new or operation._schema.is_mutable:  # else it is a view, or the argument itself, as of a dropout
            self.found.append((name, described))
        self._made |= {_address(each): each for each in new}
        return made

    def launch(self, kernel, grid, args, named):
        self.found.append((kernel, self._described((grid, args, named))))

    def _described(self, values):
        return tree_map(self._description, values)

    def _description(self, value):
        if not isinstance(value, Tensor):
            return value if isinstance(value, (int, float, str, type(None), torch.dtype)) else str(type(value))
        place = 0 if _address(value) in self._made else value.data_ptr()
        return tuple(value.shape), value.stride(), value.dtype, place


class _NoDownloads(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in DOWNLOADING:
            raise WaitsForDevice(function.__name__)
        return function(*args, **(kwargs or {}))


@contextmanager
def launches(monkeypatch):
    """The launches of a block."""
    from triton.runtime.interpreter import GridExecutor

    with monkeypatch.context() as patch, Launches() as mode, _NoDownloads():
        patch.setattr(
            GridExecutor, "__call__", lambda self, *args, **named: mode.launch(self.fn.__name__, self.grid, args, named)
        )
        yield mode.found


def _address(tensor):
    return tensor.untyped_storage().data_ptr()


def _by_mask(name, args):
    """Whether rows are selected by a mask, so their number is not known on the host."""
    if name not in ("index", "index_put", "index_put_", "_index_put_impl_"):
        return False
    return any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in args[1])


def _tensors(values):
    return [each for each in tree_leaves(values) if isinstance(each, Tensor)]
