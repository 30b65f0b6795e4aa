"""The processes that train one model together: they begin with the same values, or an error says what differs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from ...errors import TrainStepError
from .codegen.wrapped_tensors import flat


def check_group(group: object) -> None:
    """Refuse what is no group of processes that this one is in.

    Raises:
        TrainStepError: says which of these it is.
    """
    got = f"{type(group).__name__} {group!r}"
    remedy = "give torch.distributed.group.WORLD, or what new_group returned"
    if not (dist.is_available() and dist.is_initialized()):
        got += ", and torch.distributed is not initialised"
        remedy = "call torch.distributed.init_process_group first"
    elif isinstance(group, dist.ProcessGroup):
        return
    elif group == dist.GroupMember.NON_GROUP_MEMBER:  # what new_group returns to a process outside
        got = f"a group that process {dist.get_rank()} is not in"
        remedy = "make the step in the processes of the group only"
    raise TrainStepError(
        "group of train_step",
        expected="a torch.distributed.ProcessGroup that this process is in, or None",
        got=got,
        remedy=remedy,
    )


def begin_alike(
    modules: Sequence[torch.nn.Module], optimizers: Sequence[Optimizer], accumulate: int, group: dist.ProcessGroup
) -> None:
    """Give all processes the first one's parameters and buffers, in place, as DistributedDataParallel does it.

    Raises:
        TrainStepError: processes train different things; they would wait for one another. All raise it.
    """
    tensors = _tensors(modules, optimizers)
    if not tensors:
        return
    lines = "\n".join([f"accumulate={accumulate}", *_described(modules, optimizers)])
    device = next(iter(tensors)).device
    described = [text.split("\n") for text in _gathered(lines, group, device)]
    for rank, other in enumerate(described):
        pairs = itertools.zip_longest(described[0], other, fillvalue="nothing more")
        for here, there in (pair for pair in pairs if pair[0] != pair[1]):
            raise TrainStepError(
                "group of train_step",
                expected="the same model, optimizer and accumulate in all of its processes",
                got=f"{here} in process 0 of the group, {there} in process {rank}",
                remedy="make them alike; only values may differ, of which those of process 0 are taken",
            )
    with torch.no_grad():
        for tensor in flat(tensors):
            whole = tensor.detach().contiguous()  # in another process its strides may be others
            dist.broadcast(whole, group=group, group_src=0)
            if whole.data_ptr() != tensor.data_ptr():
                tensor.copy_(whole)


def _gathered(text: str, group: dist.ProcessGroup, device: torch.device) -> list[str]:
    """The texts of all processes. ``all_gather_object`` needs NumPy."""
    own = torch.tensor(list(text.encode()), dtype=torch.uint8, device=device)
    size = torch.tensor([own.numel()], device=device)
    sizes = [torch.empty_like(size) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, size, group=group)
    padded = torch.nn.functional.pad(own, (0, max(map(int, sizes)) - own.numel()))
    texts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(texts, padded, group=group)
    return [bytes(one[: int(size)].tolist()).decode() for one, size in zip(texts, sizes, strict=True)]


def _tensors(modules: Sequence[torch.nn.Module], optimizers: Sequence[Optimizer]) -> dict[torch.Tensor, None]:
    """What is trained, in the order in which gradients are averaged, and what else modules have."""
    trained = (p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"])
    own = (tensor for module in modules for tensor in (*module.parameters(), *module.buffers()))
    return dict.fromkeys([*trained, *own])


def _described(modules: Sequence[torch.nn.Module], optimizers: Sequence[Optimizer]) -> Iterator[str]:
    named = (pair for module in modules for pair in (*module.named_parameters(), *module.named_buffers()))
    names = {tensor: name for name, tensor in reversed(list(named))}  # that in the outermost module
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    trained = {p for group in groups for p in group["params"] if p.requires_grad}
    for tensor in _tensors(modules, optimizers):
        name = names.get(tensor, "a parameter that is not the model's")
        kind = str(tensor.dtype).removeprefix("torch.")
        yield f"{name}: {kind}{list(tensor.shape)}{', trained' if tensor in trained else ''}"
