"""Pages: groups share buffers, and poison is NaN in every floating-point format."""

from __future__ import annotations

import pytest
import torch

from kvpager.attention import FullAttention, Mamba
from kvpager.config import CacheConfig, GroupSpec
from kvpager.engine.storage import PagedStorage, TensorShape
from kvpager.errors import ConfigError

KEYS = TensorShape(shape=(4, 2, 3), dtype=torch.bfloat16)
STATE = (TensorShape(shape=(5, 3), dtype=torch.float16), TensorShape(shape=(2, 7), dtype=torch.float32))
CONFIG = CacheConfig(
    num_blocks=6,
    groups=(
        GroupSpec(layer_names=("a", "b"), spec=FullAttention(block_size=4)),
        GroupSpec(layer_names=("s",), spec=Mamba(block_size=4)),
    ),
)
PAGES = {"a": (KEYS, KEYS), "b": (KEYS,), "s": STATE}


def test_the_first_layers_of_all_groups_share_a_buffer() -> None:
    storage = PagedStorage(CONFIG, PAGES)
    # Page of buffer 0: two tensors of 48 bytes, or 30 + 56 rounded up to 16 each; of buffer 1: one of 48.
    assert storage.num_bytes == 6 * (96 + 48)
    keys, values = storage.tensors("a")
    assert (keys.shape, keys.dtype, keys.stride(0)) == ((6, 4, 2, 3), torch.bfloat16, 48)
    conv, recurrent = storage.tensors("s")
    assert (conv.shape, recurrent.shape) == ((6, 5, 3), (6, 2, 7))
    recurrent[3] = 1.5
    assert keys[3].isfinite().all() and (values[3] != 0).any(), "the same bytes, seen as the other group's"
    assert (values[2] == 0).all() and (storage.tensors("b")[0] == 0).all()


def test_writes_to_one_tensor_of_a_page_leave_the_others() -> None:
    storage = PagedStorage(CONFIG, PAGES)
    for name in ("a", "s"):
        first, second = storage.tensors(name)
        first[1], second[1] = 1, 2
        assert (first[1] == 1).all() and (second[1] == 2).all()
        assert (first[0] == 0).all() and (second[2] == 0).all()


@pytest.mark.parametrize("name", ["a", "b", "s"])
def test_poison_is_nan_for_every_layer_of_these_blocks_only(name: str) -> None:
    storage = PagedStorage(CONFIG, PAGES)
    storage.poison({2, 5})
    for tensor in storage.tensors(name):
        nan = tensor.float().flatten(1).isnan()
        assert nan.all(1).tolist() == nan.any(1).tolist() == [False, False, True, False, False, True]


def test_a_layer_that_the_model_lacks_is_named() -> None:
    with pytest.raises(ConfigError, match="'s'"):
        PagedStorage(CONFIG, {"a": (KEYS, KEYS), "b": (KEYS,)})
