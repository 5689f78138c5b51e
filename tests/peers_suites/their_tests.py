"""The tests of other libraries: where their sources are got from, and how they are run on ours.

`python tests/peers_suites/their_tests.py geoopt pymanopt` brings the sources of the installed versions to
`build/peers`, or says in a line what could not be got. None of their code is in this repository.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import version
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
SOURCES = Path(os.environ.get("STIEFELKIT_PEERS") or ROOT / "build" / "peers")
"""One folder a library, which holds its `tests`."""
GEOOPT = os.environ.get("STIEFELKIT_GEOOPT") or "https://github.com/geoopt/geoopt"
"""geoopt's distributions lack its tests: a repository, or a copy of it."""

IS_FULL = os.environ.get("STIEFELKIT_SUITES") == "full"
"""Whether all inputs and tests are taken, as by `make peers-suites`, or a few of each kind."""

__all__ = ["IS_FULL", "run_theirs"]


def run_theirs(library: str, files: list[str], keywords: str, **environment: str) -> None:
    """Runs tests of a library with ours in its place, in a process of their own; skips where there are no sources."""
    place = SOURCES / library / "tests"
    if not place.is_dir():
        pytest.skip(f"make peers-suites brings the tests of {library}")
    options = ["-q", "--tb=short", "--noconftest", "-c", os.devnull, "--rootdir", ".", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, "-p", f"{library}_on_ours", "-k", keywords, *files]
    path = os.pathsep.join([str(HERE), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = os.environ | {"PYTHONPATH": path, "PYTHONWARNINGS": "ignore"} | environment
    found = subprocess.run(command, cwd=place, env=env, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout[-8000:] + found.stderr[-2000:]


def fetch_geoopt(into: Path) -> None:
    """Brings the release's tree by git."""
    patience = ["-c", "http.lowSpeedLimit=1000", "-c", "http.lowSpeedTime=60"]
    git = ["git", *patience, "-c", "advice.detachedHead=false", "clone", "--quiet", "--depth", "1"]
    subprocess.run([*git, "--branch", f"v{version('geoopt')}", GEOOPT, str(into)], check=True)


def fetch_pymanopt(into: Path) -> None:
    """Brings the source distribution by pip."""
    with tempfile.TemporaryDirectory() as room:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:", "--dest", room]
        subprocess.run([*pip, f"pymanopt=={version('pymanopt')}"], check=True)
        (archive,) = Path(room).glob("*.tar.gz")
        with tarfile.open(archive) as packed:
            packed.extractall(room, filter="data")
        (folder,) = (path for path in Path(room).iterdir() if path.is_dir())
        shutil.copytree(folder, into)


FETCH = {"geoopt": fetch_geoopt, "pymanopt": fetch_pymanopt}


def main(libraries: list[str]) -> None:
    """Brings what is not there yet."""
    for library in libraries:
        into = SOURCES / library
        if into.is_dir():
            continue
        SOURCES.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=SOURCES) as room:
            try:
                FETCH[library](Path(room) / library)
            except (OSError, subprocess.SubprocessError, ValueError, tarfile.TarError) as error:
                where = f"; STIEFELKIT_{library.upper()} may name a copy" if library == "geoopt" else ""
                print(f"The tests of {library} are left out, as its sources could not be got: {error!s:.80}{where}.")
            else:
                (Path(room) / library).rename(into)


if __name__ == "__main__":
    main(sys.argv[1:])
