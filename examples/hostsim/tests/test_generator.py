import pytest
import torch
import torch.nn.functional as F
from helpers import assert_equal, capture, name, on_device, zeros

DRAWS = {
    "randn": lambda g: torch.randn(8, device=name(), generator=g),
    "rand": lambda g: torch.rand(8, device=name(), generator=g),
    "randint": lambda g: torch.randint(0, 100, (8,), device=name(), generator=g),
    "randperm": lambda g: torch.randperm(8, device=name(), generator=g),
    "normal": lambda g: zeros(8).normal_(1, 2, generator=g),
    "bernoulli": lambda g: zeros(8).bernoulli_(0.5, generator=g),
    "bernoulli of tensors": lambda g: torch.bernoulli(torch.full((8,), 0.5, device=name()), generator=g),
    "multinomial": lambda g: torch.multinomial(torch.ones(8, device=name()), 4, generator=g),
    "exponential": lambda g: zeros(8).exponential_(generator=g),
}


@pytest.mark.parametrize("draw", DRAWS)
def test_the_seed_decides(mode, device, draw):
    draw = DRAWS[draw]
    device.manual_seed(5)
    first, second = draw(None), draw(None)
    torch.manual_seed(5)
    assert_equal(draw(None), first)
    assert_equal(draw(None), second)
    own = torch.Generator(device=name()).manual_seed(5)
    assert_equal(draw(own), first)
    assert device.initial_seed() == own.initial_seed() == 5


def test_the_numbers_are_those_of_a_cpu_generator_with_that_seed(device):
    assert_equal(DRAWS["randn"](None), torch.randn(8, generator=torch.Generator().manual_seed(0)))


def test_drawing_leaves_the_generator_of_the_cpu_alone(device):
    state = torch.get_rng_state()
    F.dropout(on_device(100), 0.5)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_generator_of_the_cpu_is_refused(device):
    with pytest.raises(RuntimeError, match="generator"):
        zeros(2).normal_(generator=torch.Generator())


def test_the_state_can_be_read_and_set_also_with_draws_in_flight(mode, device):
    on_device(8)
    device.delay(device.current_stream(), 0.05)
    on_device(8)
    state, states = device.get_rng_state(), device.get_rng_state_all()
    expected = on_device(8)
    device.set_rng_state(state)
    assert_equal(on_device(8), expected)
    device.set_rng_state_all(states)
    assert_equal(on_device(8), expected)
    with torch.random.fork_rng(devices=[0], device_type=name()):
        on_device(8)
    clone = device.default_generators[0].clone_state()
    assert_equal(on_device(8), on_device(8, generator=clone))


def test_each_device_has_a_generator(device):
    first = on_device(4)
    device.manual_seed_all(0)
    with device.device(1):
        assert_equal(torch.randn(4, device=name()), first)
    device.seed()
    assert device.initial_seed() != 0
    device.seed_all()
    assert device.default_generators[1].initial_seed() == device.initial_seed()


@pytest.mark.parametrize("own", [False, True])
def test_replays_draw_what_eager_calls_would(mode, device, own):
    generator = torch.Generator(device=name()) if own else device.default_generators[0]
    source = torch.ones(100, device=name())

    def draw():
        noise = torch.randn(100, device=name(), generator=generator)
        return source + noise, torch.bernoulli(source / 2, generator=generator)

    generator.manual_seed(3)
    expected = [draw() for _ in range(3)]
    generator.manual_seed(3)
    state = generator.get_state()
    graph, result = capture(draw)
    assert torch.equal(generator.get_state(), state)
    for pair in expected:
        graph.replay()
        assert_equal(result[0], pair[0])
        assert_equal(result[1], pair[1])


def test_dropout_draws_at_every_replay(mode, device):
    source = torch.ones(1000, device=name())
    device.manual_seed(3)
    expected = [F.dropout(source, 0.5) for _ in range(2)]
    device.manual_seed(3)
    graph, result = capture(lambda: F.dropout(source, 0.5))
    for value in expected:
        graph.replay()
        assert_equal(result, value)
    assert not torch.equal(*expected)
    assert F.dropout(source, 0.0).eq(1).all() and F.dropout(source, 1.0).eq(0).all()
    assert torch.equal(F.dropout(source, 0.5, training=False), source)


def test_the_state_is_not_set_while_capturing(device):
    state = device.get_rng_state()
    with pytest.raises(RuntimeError, match="setting a generator's state is not possible while a graph is captured"):
        capture(lambda: device.set_rng_state(state))
    device.manual_seed(1)
