"""torch's allocator where the device's memory is short, or made of expandable segments."""

from __future__ import annotations

from scripts import run

BIG = """
    import gc, torch
    def big(mebibytes):
        return torch.empty(mebibytes << 20, dtype=torch.uint8, device="cuda")
    def tried(work):
        try:
            work()
        except torch.OutOfMemoryError as error:
            return str(error).splitlines()[0][:52]
        return "fits"
"""


def test_out_of_memory_and_afterwards() -> None:
    script = (
        BIG
        + """
    held = [big(30) for _ in range(3)]
    print(tried(lambda: big(70)))
    print(torch.cuda.mem_get_info()[0] >> 20, torch.cuda.get_device_properties(0).total_memory >> 20)
    print((torch.ones(4, device="cuda") + 1).sum().item())  # the device is as usable as before
    del held[1:]
    print(tried(lambda: held.append(big(70))), torch.cuda.memory_stats()["num_alloc_retries"])
    held.clear()
    torch.cuda.empty_cache()
    print(torch.cuda.memory_reserved() >> 20, tried(lambda: big(140)))
    """
    )
    assert run(script, HOSTCUDA_MEMORY="150M") == [
        "CUDA out of memory. Tried to allocate 70.00 MiB. GPU",
        "60 150",
        "8.0",
        "fits 2",
        "0 fits",
    ]


def test_a_capture_does_not_empty_the_cache() -> None:
    """PLANTED: 100 MiB lie in the cache, and nobody uses them."""
    script = (
        BIG
        + """
    for cached in (True, False):
        gc.collect()
        torch.cuda.empty_cache()
        big(100)
        if not cached:
            torch.cuda.empty_cache()
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.stream(stream):
            graph.capture_begin()
            print(cached, tried(lambda: big(60)))
            graph.capture_end()
        del graph
    """
    )
    assert run(script, HOSTCUDA_MEMORY="150M") == [
        "True CUDA out of memory. Tried to allocate 60.00 MiB. GPU",
        "False fits",
    ]


def test_expandable_segments() -> None:
    """Their memory is mapped piece by piece, in captures as well, and handed back page by page."""
    script = (
        BIG
        + """
    first, second = big(30), big(50)
    segments = torch.cuda.memory_snapshot()
    print(len(segments), segments[0]["is_expandable"], hostcuda.counter("used_bytes") >> 20)
    first.fill_(1); second.fill_(2)
    print(first.sum().item() >> 20, second[-1].item())
    address = first.data_ptr()
    del first
    torch.cuda.empty_cache()
    print(hostcuda.counter("used_bytes") >> 20, second[0].item())
    first = big(30)
    print(first.data_ptr() == address)  # torch's own address range, mapped again
    made, graph = [], torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made.append(torch.full((40 << 20,), 3, dtype=torch.uint8, device="cuda"))
    graph.replay()
    print(made[0][-1].item())
    made.clear()
    del graph, first, second
    gc.collect()
    torch.cuda.empty_cache()
    print(hostcuda.counter("used_bytes") >> 20)
    print(tried(lambda: big(200)), tried(lambda: big(140)))
    """
    )
    assert run(script, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True", HOSTCUDA_MEMORY="150M") == [
        "1 True 80",
        "30 2",
        "60 2",  # pages of 20 MiB: the second is shared with what stays
        "True",
        "3",
        "0",
        "CUDA out of memory. Tried to allocate 200.00 MiB. GP fits",
    ]


def test_an_expandable_segment_that_was_handed_back() -> None:
    """PLANTED: a graph writes memory that is mapped no longer."""
    script = (
        BIG
        + """
    from graphs import replay_error
    buffer, rest = big(40), big(40)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph.capture_begin()
        buffer.fill_(1)
        graph.capture_end()
    graph.replay()
    torch.cuda.synchronize()
    del buffer
    torch.cuda.empty_cache()
    print(replay_error(graph))
    """
    )
    assert run(script, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True") == [
        "CUDA error: an illegal memory access was encountered"
    ]
