"""Data come from a named folder or a download, recordings in any format; what is not as it should be is refused."""

import functools
import gzip
import hashlib
import http.server
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from small_data import write

from stiefelkit.errors import DataError
from stiefelkit.training import data
from stiefelkit.training.data import File

CONTENT = b"0123456789" * 500
TONE = 0.5 * np.sin(2 * np.pi * 1000 * np.arange(4000) / 8000)


def file(*urls: str, content: bytes = CONTENT) -> File:
    return File("numbers", hashlib.sha256(content).hexdigest(), urls)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No folder of data, and a cache of downloads that is empty."""
    monkeypatch.delenv(data.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def refused(of: File) -> str:
    with pytest.raises(DataError) as caught:
        data.content(of, "counts")
    return str(caught.value)


@pytest.mark.parametrize("inside", ["", "counts"])
@pytest.mark.parametrize(("name", "pack"), [("numbers", bytes), ("numbers.gz", gzip.compress)])
def test_a_file_is_found_plain_or_packed_in_the_folder_or_in_that_of_its_task(
    inside: str, name: str, pack: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    (tmp_path / inside).mkdir(exist_ok=True)
    (tmp_path / inside / name).write_bytes(pack(CONTENT))
    with data.named(tmp_path):
        assert data.content(file(), "counts") == CONTENT


def test_what_the_command_line_names_goes_before_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert data.place() is None
    monkeypatch.setenv(data.VARIABLE, str(tmp_path))
    assert data.place() == tmp_path
    (tmp_path / "speech").mkdir()
    with data.named(tmp_path / "speech"):
        assert data.place() == tmp_path / "speech"
        with data.named(None):
            assert data.place() == tmp_path / "speech"
    assert data.folder("speech") == tmp_path / "speech"
    assert data.folder("chars") == tmp_path


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no folder"):
        data.folder("speech")
    with data.named(tmp_path / "nowhere"), pytest.raises(DataError, match="nowhere"):
        data.place()


@pytest.mark.parametrize("damaged", [b"", CONTENT[:-7], gzip.compress(CONTENT)[:-7], b"\x1f\x8b\x00\x01"], ids="0123")
def test_a_damaged_file_is_refused_by_its_path(damaged: bytes, tmp_path: Path) -> None:
    (tmp_path / "numbers.gz").write_bytes(damaged)
    with data.named(tmp_path):
        assert "numbers.gz" in refused(file())


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A folder and the address at which a server of this machine shows it."""
    root = tmp_path / "served"
    root.mkdir()

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(root)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield root, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_what_is_in_no_folder_is_fetched_once_and_known_by_its_content(served: tuple[Path, str]) -> None:
    root, address = served
    of = file(f"{address}/missing.gz", f"{address}/numbers.gz")
    (root / "numbers.gz").write_bytes(gzip.compress(b"others"))
    assert f"{address}/numbers.gz" in refused(of)
    (root / "numbers.gz").write_bytes(gzip.compress(CONTENT))
    assert data.content(of, "counts") == CONTENT
    os.remove(root / "numbers.gz")
    assert data.content(of, "counts") == CONTENT


def test_what_is_nowhere_is_said_with_where_it_was_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with data.named(tmp_path):
        assert f"none in {tmp_path}" in refused(file())
        assert "127.0.0.1" in refused(file("http://127.0.0.1:9/numbers"))
    monkeypatch.setitem(sys.modules, "pooch", None)
    assert "stiefelkit[data]" in refused(file("http://127.0.0.1:9/numbers"))


# Recordings


@pytest.mark.parametrize("name", ["a.WAV", "a.flac", "a.sph"])
def test_every_format_has_the_samples_that_were_written(name: str, tmp_path: Path) -> None:
    samples, rate = data.recording(write(tmp_path / name, TONE))
    assert (rate, samples.dtype) == (8000, np.float32)
    assert np.abs(samples - TONE).max() < 1 / 2**15


def test_channels_are_averaged_and_other_rates_resampled(tmp_path: Path) -> None:
    samples, _ = data.recording(write(tmp_path / "a.flac", np.stack([TONE, 0 * TONE], axis=1)))
    assert np.abs(samples - TONE / 2).max() < 1 / 2**15
    tone = 0.5 * np.sin(2 * np.pi * 1000 * np.arange(22050) / 44100)
    samples, now = data.recording(write(tmp_path / "a.wav", tone, 44100), 8000)
    assert now == 8000
    assert abs(len(samples) - 4000) <= 1
    assert np.abs(samples[200:3800] - TONE[200:3800]).max() < 0.01


@pytest.mark.parametrize(("name", "share"), [("a.wav", 0.0), ("a.sph", 0.0), ("a.flac", 0.999)])
def test_a_file_that_cannot_be_decoded_is_refused(name: str, share: float, tmp_path: Path) -> None:
    path = write(tmp_path / name, TONE)
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(DataError, match="whole"):
        data.recording(path)


def test_what_holds_no_numbers_is_refused_and_an_extra_that_is_missing_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for content in (np.array([]), np.array([0.1, np.nan])):
        path = write(tmp_path / "a.wav", content, subtype="FLOAT")
        with pytest.raises(DataError, match="finite"):
            data.recording(path)
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(DataError, match="soundfile"):
        data.recording(path)
