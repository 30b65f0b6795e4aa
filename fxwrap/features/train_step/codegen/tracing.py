"""Dynamo's side of a training step: it is one graph, called without frame evaluation, or an error says why not."""

from __future__ import annotations

import contextlib
import copy
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch._dynamo import config, exc
from torch._dynamo.utils import graph_break_reasons

from ....codegen.dynamo.collection import with_own_code
from ....codegen.torch_versions import IGNORED_LOGGING
from ....errors import causes
from ...bind.codegen.bound import Binding
from ...bind.codegen.path import Path
from ..losses import raising_what_is_wrong
from .kept_writes import writes_kept

# What writes to a log: ``warning``, and ``warning_once``, which transformers adds to all loggers. Where
# ``isEnabledFor`` has no answer, nothing is written.
_WRITES_TO_LOG = re.compile(r"(debug|info|warn|warning|error|exception|critical|fatal|log)(_\w+)?|isEnabledFor")
# Dynamo's reason at a call of a function that has a graph break, which has a reason of its own.
_WITHIN = "step_unsupported"


def compiled_step(
    step: Callable[..., Any], options: Mapping[str, Any] | None, dynamic: bool | None
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """What ``torch.compile`` returns for a step, and a bound function of it. Nothing is compiled yet."""
    compiled = torch.compile(
        with_own_code(step),
        backend="fxwrap",
        fullgraph=True,
        dynamic=dynamic,
        options={"inputs_apart": True, **(options or {})},
    )
    binding = Binding(_tracing(compiled), Path().target(compiled))
    binding.function.ordinary_calls = binding.ordinary_calls
    return compiled, binding.function


def _tracing(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Calls that compile, with the errors and the settings of a step."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with raising_what_is_wrong(), _without_logs(), writes_kept():
            return compiled(*args, **kwargs)

    return call


def _without_logs() -> contextlib.AbstractContextManager[None]:
    """A context in which Dynamo leaves out calls of loggers, which are graph breaks otherwise."""
    kinds = [logging.Logger]
    for kind in kinds:
        kinds += kind.__subclasses__()
    owners = [logging, *dict.fromkeys(kinds)]
    ignored = {
        function
        for owner in owners
        for name, function in vars(owner).items()
        if callable(function) and _WRITES_TO_LOG.fullmatch(name)
    }
    return config.patch({IGNORED_LOGGING: {*getattr(config, IGNORED_LOGGING), *ignored}})


def mark_static(tensors: Iterable[torch.Tensor]) -> None:
    """Mark tensors as inputs whose addresses stay, as Dynamo marks parameters of modules and states of optimizers."""
    for tensor in tensors:
        if not hasattr(tensor, "_dynamo_static_input_type"):
            torch._dynamo.mark_static_address(tensor, guard=False)


# The operator that torch makes of ``nn.LSTM`` on the CPU. Where no gradient is recorded, as in a step's one graph, it
# returns no workspace for its backward (torch 2.11 to 2.15), and its backward is one that only this workspace suits.
_ONEDNN_LSTM = "mkldnn_rnn_layer"
# Begins torch's refusals of checkpoints whose sections are repeated at several places of a backward in one graph.
_CHECKPOINT = "disjoint backward regions"


def why_not_traced(error: BaseException) -> str:
    """Dynamo's or torch's reason why a step cannot be one graph; empty for errors of other kinds."""
    for cause in causes(error):
        if isinstance(cause, TypeError) and _ONEDNN_LSTM in str(cause):
            return (
                "nn.LSTM: no compiled program trains it by oneDNN. Call torch.backends.mkldnn.set_flags(False), and "
                "make the step anew"
            )
        if isinstance(cause, RuntimeError) and _CHECKPOINT in str(cause):
            return next(line for line in str(cause).splitlines() if _CHECKPOINT in line)
        if isinstance(cause, (exc.Unsupported, exc.UserError, exc.FailOnRecompileLimitHit)):
            return str(cause).split("\n\n  Developer debug context", maxsplit=1)[0].strip()
    return ""


def faults_of_forward(
    model: torch.nn.Module, loss: Callable[..., Any], batch: Sequence[Any], more: Mapping[str, Any]
) -> list[str]:
    """What it raises, if anything; else all graph breaks of the forward pass, each with its line.

    It runs in pieces, on a copy of the model.
    """
    before = len(graph_break_reasons)
    compiled = torch.compile(with_own_code(loss), backend="eager")
    try:
        twin = copy.deepcopy(model)
    except Exception:  # what cannot be copied is not tried
        return []
    try:
        with torch.random.fork_rng(), torch.enable_grad(), _without_logs():
            compiled(twin, *batch, **more)
    except (exc.TorchDynamoException, torch.OutOfMemoryError):
        pass  # no fault of the function's own
    except Exception as error:
        return [f"loss(model, *batch) raises {type(error).__name__}: {error}"]
    places = (
        (noted.user_stack[-1], noted.reason.split("\n\n", maxsplit=1)[0])
        for noted in graph_break_reasons[before:]
        if noted.reason != _WITHIN
    )
    found = [f"graph break at {place.filename}, line {place.lineno}: {why}" for place, why in places]
    return list(dict.fromkeys(found))
