"""The contract fails on a faulty device: each fault is noticed, and by the test that is meant for it."""

import contextlib
import gc
import io
import sys
from pathlib import Path

import pytest
import torch
from conftest import UNSUPPORTED

if UNSUPPORTED:
    pytest.skip(UNSUPPORTED, allow_module_level=True)
pytest.importorskip("fxwrap", reason="the contract is a part of fxwrap")

import hostsim
from hostsim import inductor

from fxwrap.testing import graphs

CONTRACT = Path(__file__).with_name("test_contract.py")

# Fault in the device -> the first test of the contract to fail. No device owes poison, a service of the simulator, or
# nodes that decide: test_faults.py sees to these.
FIRST_TO_FAIL = {
    "storage_offset_dropped": "test_copies_there_and_back",
    "events_do_not_wait": "test_a_stream_waits_for_another",
    "non_blocking_copy_too_late": "test_pinned_copies_are_in_the_order_of_their_stream",
    "record_stream_ignored": "test_memory_is_not_reused_while_a_stream_uses_it",
    "replay_ignores_refilled_inputs": "test_compiles_and_runs",
    "replay_skips_last_node": "test_compiles_and_runs",
    "generator_not_advanced": "test_random_numbers_follow_the_seed",
    "replay_on_default_stream": "test_replay_runs_on_the_current_stream",
    "pool_not_shared": "test_graphs_share_a_pool",
    "pool_memory_not_kept": "test_graphs_share_a_pool",
    "capture_allows_item": "test_capture_refuses_to_wait",
    "capture_allows_synchronize": "test_capture_refuses_to_wait",
    "capture_allows_pageable_copy": "test_capture_refuses_to_wait",
    "capture_on_default_stream_allowed": "test_capture_refuses_the_default_stream",
    "recapture_without_reset_allowed": "test_capture_needs_a_reset_in_between",
    "unjoined_fork_allowed": "test_forked_work_must_join",
    "no_poison": None,
    "branch_always_runs": None,
    "loop_runs_once": None,
}


class Failures:
    """A pytest plugin that notes which tests failed."""

    def __init__(self):
        self.names, self.passed = [], 0

    def pytest_runtest_logreport(self, report):
        self.passed += report.passed and report.when == "call"
        if report.failed:
            self.names.append(report.nodeid.split("::")[-1].split("[")[0])


def run_contract(*arguments, tests=50):
    """Run the contract, so many tests at least, up to the first failure; its name, or None."""
    failures = Failures()
    with contextlib.redirect_stdout(io.StringIO()):
        sys.modules.pop("test_contract", None)
        # Without pytest's plugin that collects garbage ten times when it ends.
        plain = ["-x", "-p", "no:cacheprovider", "-p", "no:unraisableexception"]
        pytest.main([*plain, str(CONTRACT), *arguments], plugins=[failures])
    gc.collect()  # a capture that a failed test has left
    assert failures.names or failures.passed >= tests, "the contract did not run"
    return failures.names[0] if failures.names else None


def test_every_fault_is_expected_somewhere(device):
    assert set(FIRST_TO_FAIL) == set(device.faults())


@pytest.mark.parametrize("fault", FIRST_TO_FAIL)
def test_a_fault_of_the_device(device, fault):
    device.plant_fault(fault)
    expected = FIRST_TO_FAIL[fault]
    # Faults of graphs alone: without the compilations that come before.
    shorter = ["-k", "not TestCompilation"] if hasattr(graphs.SUITE, expected or "") else []
    assert run_contract(*shorter) == expected


def test_failed_captures_that_nobody_puts_right(device, monkeypatch):
    """A device that is as strict as CUDA, and does not say how to put right what a failed capture leaves."""
    monkeypatch.setattr(device, "relax", lambda rule: None)
    device.enforce_all_rules()
    run = ("-k", "test_a_capture_that_failed_spoils_nothing")
    assert run_contract(*run, tests=1) is None
    recover, left = hostsim.device.recover, []
    monkeypatch.setattr(hostsim.device, "recover", lambda *capture: left.append(capture))
    try:
        assert run_contract(*run) == "test_a_capture_that_failed_spoils_nothing"
    finally:
        for capture in left:
            recover(*capture)
        graph = torch.accelerator.Graph()
        with torch.Stream():
            graph.capture_begin()
            graph.capture_end()


def test_a_launch_that_the_capture_does_not_see(device, monkeypatch):
    """Kernels that run at once: right until the first replay."""
    monkeypatch.setattr(hostsim.device, "launch", lambda function, *args: function(*args))
    assert run_contract() is not None


def test_a_registration_that_stays(device, monkeypatch):
    class Stays:
        def __init__(self, handle):
            self.handle = handle

        def unregister(self):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.handle.unregister()

    register = inductor.register
    made = []

    def staying():
        made.append(Stays(register()))
        return made[-1]

    monkeypatch.setattr(inductor, "register", staying)
    assert run_contract() == "test_the_handle_takes_it_back"
    made[-1].handle.unregister()


def test_a_fake_device_that_is_lost(device, monkeypatch):
    """An operator whose fake result is on the CPU."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    real = FakeTensorMode.dispatch

    def dispatch(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.add.Tensor:
            args = torch.utils._pytree.tree_map(lambda t: t.cpu() if isinstance(t, torch.Tensor) else t, args)
        return real(self, func, types, args, kwargs)

    monkeypatch.setattr(FakeTensorMode, "dispatch", dispatch)
    assert run_contract() is not None
