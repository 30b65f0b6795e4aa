"""Exact packing: the smallest arena, and the proof that there is no smaller one (``plan_memory(exact=True)``)."""
