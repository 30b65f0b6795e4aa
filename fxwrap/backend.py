"""The entry point: what ``torch.compile(model, backend="fxwrap")`` calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.fx import GraphModule

from .codegen.dynamo.collection import collected_by
from .codegen.frames import with_room
from .codegen.inductor import compile_with_inductor, inductor_options, mode_options
from .codegen.torch_versions import registered_operators
from .graphs.compilation import Compilation
from .options import Options, parse_options


def fxwrap(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    compilation: Compilation | None = None,
) -> Callable[..., Any]:
    """Compile a Dynamo graph with TorchInductor, and plan, capture and replay what it emits.

    Args:
        gm: the graph that Dynamo traced.
        example_inputs: its (fake) inputs.
        mode: a mode of ``torch.compile``; its settings are passed to Inductor. Device graphs are always fxwrap's own.
        options: fxwrap's options and Inductor's, in one dictionary.
        compilation: collects the programs made in this call (see ``fxwrap.explain``).

    Raises:
        OptionError: an option or the mode is unknown or has a wrong value.
        UnsupportedModelError: the graph uses more than one accelerator.
    """
    fxwrap_options, patches = parsed(options)
    compilation = compilation if compilation is not None else Compilation()
    begin = time.perf_counter()
    settings = {**mode_options(mode), **patches}
    compiled = with_room(compile_with_inductor, gm, example_inputs, fxwrap_options, settings, compilation)
    compilation.seconds = time.perf_counter() - begin
    return collected_by(compiled, compilation)


def parsed(options: Mapping[str, Any] | None) -> tuple[Options, dict[str, Any]]:
    """Split options into fxwrap's and Inductor's settings. Raises OptionError for a name that is neither."""
    if options is None or options == {}:
        return Options(), {}
    return parse_options(options, inductor_options(), registered_operators())
