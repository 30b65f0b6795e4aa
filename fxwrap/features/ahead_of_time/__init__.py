"""Methods compiled ahead of time, which are called in this process or written to a file that others read.

``aot_compile.py`` compiles, ``aot_program.py`` is what one calls, ``save.py`` writes and ``load.py`` reads;
``codegen/`` has what touches Inductor and Triton.
"""
