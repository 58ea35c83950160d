import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """Tensors this small are computed fastest by one thread, above all on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
