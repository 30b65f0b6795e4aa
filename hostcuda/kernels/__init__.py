"""Triton's kernels, which the device launches: computed by Triton's interpreter over the same memory.

::

    registry      which function a cubin was compiled from
    language      a copy of Triton's language and interpreter
    libdevice     functions of libdevice, for kernels in the copy
    names         what a kernel names, as its counterpart in the copy
    functions     a function rewritten for the interpreter
    scans         reductions and scans of whole blocks
    operations    what else is done for whole blocks
    parameters    a launch's parameters, read from the device's bytes
    interpreter   runs a kernel's programs
    launches      called by the device for each launch

Each file imports only those above it.
"""
