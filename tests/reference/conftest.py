import pytest
import torch


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes seconds")


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
