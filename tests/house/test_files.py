"""What is read from files of others: each fault is one error that names the file or the entry."""

import struct
from pathlib import Path

import pytest
import torch

from stiefelkit.errors import CheckpointError, RunError
from stiefelkit.files import checked_cast, importing, parse_json, parse_tensors, read_json

TWICE = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{"dtype":"F64","shape":[1],"data_offsets":[0,8]}}'


@pytest.mark.parametrize(
    "content", [b"[1e999]", b"NaN", b'{"a": 1, "a": 2}', b"[" * 100_000, b"1" * 5000, b"\xff", b""]
)
def test_json_is_finite_flat_and_has_each_key_once(content: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"of\.json"), importing("load", "of.json"):
        parse_json(content)


@pytest.mark.parametrize("content", [b"", bytes(8), b"\xff" * 8, struct.pack("<Q", len(TWICE)) + TWICE + bytes(8)])
def test_tensors_have_each_name_once(content: bytes) -> None:
    with pytest.raises(CheckpointError, match="a file"), importing("load", "a file"):
        parse_tensors(content)


@pytest.mark.parametrize("path", ["a" * 5000, "a\0b", "/dev/zero", "missing", "large"])
def test_a_path_that_is_no_small_file_is_refused_before_it_is_read(tmp_path: Path, path: str) -> None:
    (tmp_path / "large").touch()
    (tmp_path / "large").open("r+b").truncate(2**40)
    with pytest.raises(RunError, match="file"), importing("load", path, RunError):
        read_json(tmp_path / path)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (torch.tensor(1e300, dtype=torch.float64), torch.float32),
        (torch.tensor(1e5), torch.float16),
        (torch.tensor(float("nan")), torch.float64),
        (torch.zeros(()).to(torch.float8_e4m3fn), torch.float32),
        (torch.tensor(1), torch.float32),
        (torch.zeros((), dtype=torch.complex64), torch.float32),
        (torch.zeros(()), torch.complex64),
        (torch.tensor(300), torch.uint8),
        (torch.tensor(2), torch.bool),
        (torch.tensor(2**63, dtype=torch.uint64), torch.int64),
    ],
)
def test_a_tensor_that_a_dtype_does_not_hold_is_refused(value: torch.Tensor, dtype: torch.dtype) -> None:
    with pytest.raises(CheckpointError, match="a/b"):
        checked_cast("a/b", value, dtype)


def test_a_tensor_that_fits_is_cast() -> None:
    half = torch.tensor([1.5, -2.0], dtype=torch.bfloat16)
    assert torch.equal(checked_cast("a", half, torch.float64, (2,)), half.double())
    assert checked_cast("a", torch.tensor(3), torch.int8).dtype == torch.int8
    with pytest.raises(CheckpointError, match="shape"):
        checked_cast("a", half, torch.float32, (1, 2))
