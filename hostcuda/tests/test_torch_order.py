"""Lazy order and node order as torch's users meet them: streams, pinned memory, graphs of several streams."""

from __future__ import annotations

from scripts import run


def test_streams_of_torch() -> None:
    """PLANTED in each: the wait that makes the second number."""
    script = """
        import torch
        from graphs import capture
        ones = torch.ones(1000)
        torch.cuda.synchronize()

        def between_streams(waits):
            side = torch.cuda.Stream()
            source, result = torch.zeros(1000, device="cuda"), torch.zeros(1000, device="cuda")
            torch.cuda.synchronize()
            source.fill_(3)
            if waits:
                side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                result.copy_(source)
            side.synchronize()
            torch.cuda.synchronize()
            return result[0].item()

        def to_the_host(waits):
            source, host = torch.full((1000,), 3.0, device="cuda"), torch.zeros(1000, pin_memory=True)
            host.copy_(source, non_blocking=True)
            if waits:
                torch.cuda.current_stream().synchronize()
            return host[0].item()

        def from_pinned_memory(waits):
            host, result = torch.full((1000,), 3.0, pin_memory=True), torch.zeros(1000, device="cuda")
            result.copy_(host, non_blocking=True)
            if waits:
                torch.cuda.current_stream().synchronize()
            host.fill_(0)
            return result[0].item()

        def from_pageable_memory(waits):  # staged at once: right without a wait
            host, result = torch.full((1000,), 3.0), torch.zeros(1000, device="cuda")
            result.copy_(host, non_blocking=True)
            host.fill_(0)
            return result[0].item()

        def after_a_replay(waits):
            side, result = torch.cuda.Stream(), torch.zeros(1000, device="cuda")
            graph = capture(lambda: result.add_(3))
            torch.cuda.synchronize()
            with torch.cuda.stream(side):
                graph.replay()
            if waits:
                torch.cuda.current_stream().wait_stream(side)
            return result[0].item()

        def static_input(waits):  # the next input is written before the replay has read this one
            side = torch.cuda.Stream()
            source, result = torch.full((9,), 3.0, device="cuda"), torch.zeros(9, device="cuda")
            graph = capture(lambda: result.copy_(source))
            torch.cuda.synchronize()
            graph.replay()
            if waits:
                side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                source.fill_(0)
            side.synchronize()
            return result[0].item()

        cases = between_streams, to_the_host, from_pinned_memory, from_pageable_memory, after_a_replay, static_input
        for case in cases:
            without = case(False)
            torch.cuda.synchronize()  # what was not waited for runs before its memory is used again
            print(case.__name__, without, case(True))
    """
    assert run(script, HOSTCUDA_LAZY="1") == [
        "between_streams 0.0 3.0",
        "to_the_host 0.0 3.0",
        "from_pinned_memory 0.0 3.0",
        "from_pageable_memory 3.0 3.0",
        "after_a_replay 0.0 3.0",
        "static_input 0.0 3.0",
    ]


def test_branches_of_a_graph() -> None:
    """PLANTED: a side stream of the capture reads before it waits; lifo shows it, beside poison and lazy order."""
    script = """
        import torch
        from graphs import capture
        def branches(source, result, waits):
            main, side = torch.cuda.current_stream(), torch.cuda.Stream()
            side.wait_stream(main)
            source.fill_(3)
            if waits:
                side.wait_stream(main)
            with torch.cuda.stream(side):
                result.copy_(source)
            main.wait_stream(side)
        for waits in (False, True):
            source, result = torch.zeros(9, device="cuda"), torch.zeros(9, device="cuda")
            graph = capture(lambda: branches(source, result, waits))
            graph.replay()
            print(result[0].item())
    """
    assert run(script, HOSTCUDA_ORDER="lifo", HOSTCUDA_LAZY="1", HOSTCUDA_POISON="1") == ["0.0", "3.0"]
    assert run(script, HOSTCUDA_LAZY="1") == ["3.0", "3.0"]


def test_a_list_with_a_number_on_the_host() -> None:
    """As optimizers have counts of steps, some on the device, some on the host: both are counted."""
    script = """
        import torch
        counts = [torch.ones((), device="cuda"), torch.ones(())]
        torch._foreach_add_(counts, 1)
        torch._foreach_mul_(counts, 3)
        print([count.item() for count in counts])
    """
    assert run(script) == run(script, HOSTCUDA_LAZY="1") == ["[6.0, 6.0]"]
