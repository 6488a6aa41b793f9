"""What the tests share: random tensors with a fixed seed."""

import pytest
import torch


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
