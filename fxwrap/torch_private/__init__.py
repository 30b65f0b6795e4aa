"""The private interfaces of torch that a program needs while it runs, and the C++ library that replays programs.

It is the ground floor: every other part may import it, and it imports nothing of fxwrap but the builder of libraries.
What belongs to one compilation (Inductor, Dynamo, AOTAutograd) is touched in ``codegen/`` only.
"""
