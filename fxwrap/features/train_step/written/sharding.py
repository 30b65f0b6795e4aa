"""Parameters that lie in parts with several processes: each is gathered for its use, and its gradient is scattered.

::

    weight: float32[64, 32]   ->   2 processes: DTensor[64, 32], of which each has float32[32, 32]
    F.linear(x, self.weight)       self.weight: gathered, float32[64, 32]
    backward                       the average of all processes' gradients, of which each gets its part

It is what ``FullyShardedDataParallel`` does, in operators that a graph holds. The place in the module, a property of
the class, is that of torchtitan's SimpleFSDP (arXiv:2411.00284).
"""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from ....errors import TrainStepError


def shard_parameters(module: torch.nn.Module, mesh: DeviceMesh) -> None:
    """Leave each process of a mesh with its part of a module's parameters, in place.

    For training with batches of each process's own, by ``fxwrap.train_step(step)`` or by the loop as it is written.
    Make optimizers afterwards: their states have parts, too. ``state_dict()`` has the names that it had, and
    ``DTensor``s; ``torch.distributed.checkpoint`` saves and loads these. With ``memory_limit``, a gathered parameter
    is dropped after its use, and gathered once more for the gradients of what came before.

    Args:
        module: all processes have the same one; parameters of the mesh's first are taken.
        mesh: of one dimension, such as ``torch.distributed.device_mesh.init_device_mesh("cpu", (4,))``.

    Raises:
        TrainStepError: the mesh has more dimensions, or a module keeps its parameters elsewhere, too (``nn.LSTM``).
    """
    if mesh.ndim != 1:
        raise TrainStepError("mesh of shard_parameters", expected="one dimension", got=f"{mesh.ndim} dimensions")
    if kept := [type(part).__name__ for part in module.modules() if isinstance(part, torch.nn.RNNBase)]:
        raise TrainStepError(
            "module of shard_parameters",
            expected="modules that read their parameters by name at each call",
            got=f"{kept[0]}, which keeps a list of them",
            remedy="shard the other modules, each by itself",
        )
    made: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for part in list(module.modules()):
        own = {name: parameter for name, parameter in part._parameters.items() if parameter is not None}
        for name, parameter in own.items():
            if parameter not in made:  # a tied weight is one afterwards, too
                made[parameter] = _in_parts(parameter, mesh)
            part._parameters[name] = made[parameter]
        if own:
            part.__class__ = _gathering(type(part), tuple(own))


def _in_parts(parameter: torch.nn.Parameter, mesh: DeviceMesh) -> torch.nn.Parameter:
    placement = Shard(0) if parameter.dim() else Replicate()
    parts = distribute_tensor(parameter.detach(), mesh, [placement])
    return torch.nn.Parameter(parts, requires_grad=parameter.requires_grad)


def _gathering(kind: type[torch.nn.Module], names: tuple[str, ...]) -> type[torch.nn.Module]:
    """The class of a module whose parameters are gathered where its code reads them."""

    def reading(name: str) -> property:
        def gathered(module: torch.nn.Module) -> torch.Tensor | None:
            parameter = module._parameters[name]
            if not isinstance(parameter, DTensor):
                return parameter
            whole = parameter.redistribute(placements=[Replicate()])
            return whole.to_local(grad_placements=[Partial("avg")])

        return property(gathered)

    body = {name: reading(name) for name in names}
    return type(kind.__name__, (kind,), {**body, "__module__": kind.__module__})
