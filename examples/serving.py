"""Serve a small decoder: buckets, recordings ahead of time, the caller's tensors, new weights, memory lent.

    python examples/serving.py [--device cuda]

Each step prints what it did. ``docs/serving.md`` explains the steps.
"""

from __future__ import annotations

import argparse

import torch

import fxwrap

SIZES, WIDTH, VOCABULARY, LENGTH = (1, 2, 4, 8), 32, 64, 16


class Decoder(torch.nn.Module):
    """One step of a decoder with one layer: it writes keys and values to a cache, and attends to what is there."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.qkv, self.merge = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.head = torch.nn.Linear(WIDTH, VOCABULARY)

    def forward(
        self, token: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, place: torch.Tensor
    ) -> torch.Tensor:
        x = self.embed(token)
        q, k, v = self.qkv(x).chunk(3, -1)
        places = torch.arange(LENGTH, device=token.device)
        here = places == place
        keys.copy_(torch.where(here[:, None], k[:, None], keys))
        values.copy_(torch.where(here[:, None], v[:, None], values))
        scores = (keys @ q[:, :, None]).squeeze(-1).masked_fill(places > place, -1e9)
        return self.head(x + self.merge((scores.softmax(-1)[:, None] @ values).squeeze(1)))


def request(rows: int, device: str) -> tuple[torch.Tensor, ...]:
    """A token and an empty cache for each row. The first dimension of all three is the batch."""
    token = torch.randint(0, VOCABULARY, (rows,), device=device)
    call = token, *(torch.zeros(rows, LENGTH, WIDTH, device=device) for _ in range(2))
    for tensor in call:
        fxwrap.mark_bucket(tensor, 0, "batch")
    return *call, torch.zeros((), dtype=torch.int64, device=device)


def serve(device: str, suspendable: bool) -> None:
    """Args: suspendable: whether the device keeps memory for recordings between calls."""
    torch.manual_seed(0)
    model = Decoder().to(device).eval()

    # 1. One recording for each bucket, made ahead of time: the largest first, so that arenas grow once.
    options = {"buckets": {"batch": SIZES}, "suspendable": suspendable}
    decode = torch.compile(model, backend="fxwrap", options=options)
    for rows in sorted((size for size in SIZES if size > 1), reverse=True):
        for _ in range(3):
            decode(*request(rows, device))
    ready = sum(fxwrap.stats(decode)["recordings"].values())
    print(f"1. {ready} recordings for the sizes {SIZES}")

    # 2. Requests of any size replay them.
    for rows in (3, 5, 7, 2, 6, 8, 4):
        # A result that is dropped before the next call costs no copy.
        assert decode(*request(rows, device)).shape == (rows, VOCABULARY)
    stats = fxwrap.stats(decode)
    print(f"2. after 7 sizes: {sum(stats['recordings'].values())} recordings, {stats['replays']} replays")

    # 3. A method that is compiled ahead of time writes to the server's own tensor.
    program = fxwrap.aot_compile({"decode": (model, request(8, device))})
    mine, call = torch.empty(8, VOCABULARY, device=device), request(8, device)
    assert program.decode.run(*call, out=mine) is mine
    print(f"3. logits in the caller's tensor: {torch.equal(mine, program.decode(*call))}")

    # 4. New weights are copied to where the old ones are: nothing is compiled and nothing is recorded.
    before = sum(fxwrap.stats(decode)["recordings"].values())
    model.load_state_dict({name: torch.randn_like(weight) for name, weight in model.state_dict().items()})
    updated = decode(*call)
    torch.testing.assert_close(updated, model(*request_like(call)), rtol=1e-3, atol=1e-3)
    print(f"4. recordings for new weights: {sum(fxwrap.stats(decode)['recordings'].values()) - before}")

    # 5. Between batches the device's memory can be lent. The next call takes it again.
    if suspendable:
        del updated  # a live output; suspend(live="copy") would keep it
        given_back = fxwrap.suspend(decode)
        again = decode(*call)
        torch.testing.assert_close(again, model(*request_like(call)), rtol=1e-3, atol=1e-3)
        print(f"5. {given_back:,} bytes were given back, and taken again by a call")
    else:
        print("5. on a CPU there is nothing to suspend: fxwrap.release frees what is kept there")


def request_like(call: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """The same call with caches of its own, which a call writes."""
    token, keys, values, place = call
    return token, keys.clone(), values.clone(), place


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    with torch.inference_mode():
        device = parser.parse_args().device
        serve(device, suspendable=torch.device(device).type != "cpu")
