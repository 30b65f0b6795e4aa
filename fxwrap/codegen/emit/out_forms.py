"""Finds the ``out=`` form of an operator, with which it writes its results into memory that the plan owns."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch._ops import OpOverload

# Operators whose out= form has a kernel on the device, and yet saves no memory or gives other numbers. Found by a
# measurement over torch's own table of operators, which tests/codegen/test_out_forms.py repeats.
_NO_GAIN = {
    "aten::_fft_c2c": "its out= form computes elsewhere and copies",
    "aten::_fft_c2r": "its out= form computes elsewhere and copies",
    "aten::_fft_r2c": "its out= form computes elsewhere and copies",
    "aten::cholesky": "its out= form computes elsewhere and copies",
    "aten::huber_loss": "its out= form computes elsewhere and copies",
    "aten::mvlgamma": "its out= form computes elsewhere and copies",
    "aten::binary_cross_entropy": "its out= form rounds differently",
    "aten::mse_loss": "its out= form has its result grow for a while",
    "aten::smooth_l1_loss": "its out= form has its result grow for a while",
}
# Tags of an operator that later stages read.
_TAGS = (
    torch.Tag.nondeterministic_seeded,
    torch.Tag.dynamic_output_shape,
    torch.Tag.data_dependent_output,
    torch.Tag.cudagraph_unsafe,
)


@dataclass(frozen=True)
class OutForm:
    """The form of an operator that writes its results into tensors that it is given.

    Attributes:
        overload: takes the functional form's arguments, and tensors for the results.
        results: names of the arguments for the results, in order.
    """

    overload: OpOverload
    results: tuple[str, ...]


@functools.cache
def out_form(overload: OpOverload, device_type: str) -> OutForm | str:
    """The ``out=`` form of a functional operator on a device, or why its results cannot be planned.

    A form is useful only if it computes in the given memory and gives the functional form's numbers. For most
    operators torch generates one of the two forms. A generated ``out=`` form runs the functional one and copies: it
    is useless, and is known by its registration for every device. A generated functional form allocates and runs the
    ``out=`` form ("structured" operators): that ``out=`` form is useful. Where both are hand-written, the device must
    have a kernel for the ``out=`` form. A custom operator's author declares with a tag that both agree.
    """
    schema = overload._schema
    name = overload.name()
    if any(argument.alias_info is not None for argument in schema.arguments):
        return "it writes or returns an argument"
    if not schema.returns or any(str(declared.type) != "Tensor" for declared in schema.returns):
        return "it does not return a fixed number of tensors"
    form = _sibling(overload)
    if form is None:
        return "it has no out= form"
    if schema.name in _NO_GAIN:
        return _NO_GAIN[schema.name]
    if overload.namespace != "aten":
        tagged = getattr(torch.Tag, "out", None) in form.overload.tags
        return form if tagged else "its out= form is not tagged torch.Tag.out"
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    sibling = form.overload.name()
    structured = has_kernel(name, "CompositeExplicitAutogradNonFunctional")
    composite = has_kernel(sibling, "CompositeExplicitAutograd")
    on_device = has_kernel(sibling, torch._C._dispatch_key_for_device(device_type))
    if not on_device and (composite or not structured):
        return "its out= form computes elsewhere and copies"
    if any(tag in overload.tags and tag not in form.overload.tags for tag in _TAGS):
        return "its out= form does not declare what it does"
    return form


def _sibling(overload: OpOverload) -> OutForm | None:
    """The overload with the same arguments, and a tensor to write for each result; None if there is none."""
    arguments = [(argument.name, str(argument.type)) for argument in overload._schema.arguments]
    packet = overload._overloadpacket
    for name in packet.overloads():
        candidate: OpOverload = getattr(packet, name)
        written = [a for a in candidate._schema.arguments if a.is_write]
        others = [(a.name, str(a.type)) for a in candidate._schema.arguments if not a.is_write]
        one_a_result = len(written) == len(overload._schema.returns)
        tensors = all(a.kwarg_only and str(a.type) == "Tensor" for a in written)
        if one_a_result and tensors and others == arguments:
            return OutForm(candidate, tuple(argument.name for argument in written))
    return None
