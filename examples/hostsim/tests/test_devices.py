import torch
from helpers import assert_equal, on_device


def test_the_accelerator_is_the_device(device):
    assert torch.accelerator.current_accelerator().type == device.default_stream().device.type
    assert torch.accelerator.device_count() == device.device_count() == 2
    assert device.is_available() and device.is_initialized()


def test_the_current_device_can_be_set_and_is_restored(device):
    assert device.current_device() == 0
    with device.device(1):
        assert device.current_device() == torch.accelerator.current_device_index() == 1
        tensor = on_device(2)
    assert tensor.device.index == 1 and device.current_device() == 0
    with device.device_of(tensor):
        assert device.current_device() == 1
    with device.device_of(torch.zeros(1)), device.device(None):
        assert device.current_device() == 0
    with torch.accelerator.device_index(1):
        assert device.current_device() == 1
    torch.accelerator.set_device_index(1)
    assert device.current_device() == 1


def test_a_device_that_does_not_exist_is_an_error(device):
    for use in (lambda: device.set_device(7), lambda: torch.zeros(1, device=f"{device.get_device_name(0)[:-1]}7")):
        try:
            use()
        except RuntimeError as error:
            assert "there are 2" in str(error)
        else:
            raise AssertionError("no error")
    assert device.current_device() == 0


def test_properties(device):
    properties = device.get_device_properties(1)
    assert properties.name == device.get_device_name(1) and properties.index == 1
    assert properties.total_memory > 0 and device.get_device_capability() == (1, 0)
    assert device.is_bf16_supported() and torch.bfloat16 in device.get_amp_supported_dtype()


def test_tensors_move_between_devices(mode, device):
    tensor = on_device(3, 4)
    other = tensor.to(torch.device(tensor.device.type, 1))
    assert other.device.index == 1
    assert_equal(other, tensor)
    back = torch.empty_like(tensor).copy_(other)
    assert_equal(back, tensor)


def test_tensors_of_two_devices_cannot_be_mixed(device):
    a, b = on_device(2), torch.zeros(2, device=torch.device(on_device(1).device.type, 1))
    for mixed in (lambda: a + b, lambda: torch.mm(a.view(1, 2), torch.ones(2, 1))):
        try:
            mixed()
        except RuntimeError as error:
            assert "same device" in str(error)
        else:
            raise AssertionError("no error")


def test_methods_are_generated(device):
    tensor = getattr(torch.ones(2), torch.accelerator.current_accelerator().type)()
    assert getattr(tensor, f"is_{tensor.device.type}")
    assert device.get_amp_supported_dtype()
