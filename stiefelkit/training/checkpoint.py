"""Checkpoints: a folder with the tensors (safetensors) and the rest (JSON), complete or absent.

It is written under a temporary name, synced and renamed. The digest in the JSON is that of its record, which holds the
digest of the tensors.
"""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as save_tensors
from torch import Tensor

from stiefelkit import files
from stiefelkit.errors import RunError, needs

KEPT = 2
LARGEST = 2**30  # bytes of the JSON, and of a log, at most
TENSORS, STATE = "tensors.safetensors", "state.json"
PREFIX, TEMPORARY = "step-", ".tmp-"
PLAIN = type(None), bool, int, float, str
NAME = re.compile(rf"{PREFIX}(\d{{8,}})", re.ASCII)


def place_of(folder: Path, step: int) -> Path:
    """Returns the place of the checkpoint of a step."""
    return folder / f"{PREFIX}{step:08d}"


def save(folder: Path, step: int, state: dict[str, Any]) -> Path:
    """Writes the checkpoint of a step: nested dicts, lists, tuples of tensors and plain values; keeps the last two."""
    files.make_folder(folder)
    tree, tensors = pack(state)
    content = save_tensors(tensors)
    final, temporary = place_of(folder, step), folder / f"{TEMPORARY}{step:08d}"
    run = folder.parent  # below which no link is followed
    for stale in folder.glob(f"{TEMPORARY}*"):
        files.remove(stale, run)
    files.make_folder(temporary, run)
    files.write_synced(temporary / TENSORS, content, run)
    mark = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
    record = {"step": step, "tensors": mark, "state": tree}
    files.write_synced(temporary / STATE, _sealed(record), run)
    files.sync_directory(temporary)
    files.remove(final, run)  # a damaged one that was resumed past
    files.rename(temporary, final.name, run)
    files.sync_directory(folder)
    # those of later steps are damaged or no checkpoints of this run, and must not push out one that is
    kept = [path for path in checkpoints(folder) if step_of(path) <= step][-KEPT:]
    for old in _named(folder):  # also what a kill has left of one while it was removed
        if step_of(old) <= step and old not in kept:
            files.remove(old, run)
    return final


def _named(folder: Path) -> list[Path]:
    return sorted((path for path in folder.glob(f"{PREFIX}*") if NAME.fullmatch(path.name)), key=step_of)


def checkpoints(folder: Path) -> list[Path]:
    """Returns the checkpoints in a folder, damaged ones too, oldest first; half-written ones have another name."""
    return [path for path in _named(folder) if any((path / name).exists() for name in (STATE, TENSORS))]


def step_of(path: Path) -> int:
    """Returns the step in the name of a checkpoint."""
    return int(path.name.removeprefix(PREFIX))


def latest(folder: Path) -> tuple[int, dict[str, Any], list[str]] | None:
    """Returns step and state of the last whole checkpoint, and a sentence for each later one; None if there is none.

    Raises RunError if there are checkpoints and all of them are damaged.
    """
    damages: list[str] = []
    for path in reversed(checkpoints(folder)):
        try:
            step, state = load(path)
            return step, state, [f"{damage} Resuming from step {step} instead." for damage in damages]
        except RunError as error:
            damages.append(str(error))
    needs(not damages, RunError, "Resuming", "a whole checkpoint", f"only damaged ones: {' '.join(damages)[:-1]}")
    return None


def load(path: Path) -> tuple[int, dict[str, Any]]:
    """Returns step and state of one checkpoint; raises RunError if a file is missing or is not what was written."""
    run, step = path.parent.parent, step_of(path)
    with files.importing("A checkpoint", path, RunError):
        sealed = files.read_file(path / STATE, run, LARGEST)
        record = json.loads(sealed)["record"]
        content = files.read_file(path / TENSORS, run, record["tensors"].get("bytes"))  # which 0.1 did not write
        digest = hashlib.sha256(content).hexdigest()
        # JSON of its own making comes back to the byte
        if sealed != _sealed(record) or (record["step"], record["tensors"]["sha256"]) != (step, digest):
            raise ValueError("it is not what was written")
        return step, dict(unpack(record["state"], files.parse_tensors(content)))


def _sealed(record: object) -> bytes:
    digest = hashlib.sha256(json.dumps(record).encode()).hexdigest()
    return json.dumps({"sha256": digest, "record": record}).encode()


def pack(state: object) -> tuple[object, dict[str, Tensor]]:
    """Splits a nested state into a JSON tree and the unshared tensors of safetensors, which lacks complex128."""
    tensors: dict[str, Tensor] = {}

    def walk(value: object, path: str) -> object:
        if isinstance(value, Tensor):
            value = value.detach().resolve_conj().resolve_neg()
            pairs = value.dtype == torch.complex128
            value = torch.view_as_real(value) if pairs else value
            tensors[path] = value.cpu().clone(memory_format=torch.contiguous_format)
            return {"": "pairs" if pairs else "tensor", "at": path}
        if isinstance(value, dict):
            # a list of pairs: the keys of optimizer states are integers, which JSON would turn into strings
            place = f"{path}/" if path else ""
            items = [[k, v if isinstance(v, PLAIN) else walk(v, f"{place}{k}")] for k, v in value.items()]
            return {"": "dict", "items": items}
        if isinstance(value, list | tuple):
            items = [v if isinstance(v, PLAIN) else walk(v, f"{path}/{i}") for i, v in enumerate(value)]
            return {"": "tuple", "items": items} if isinstance(value, tuple) else items
        raise TypeError(f"A checkpoint cannot hold {type(value).__name__} at {path!r}.")

    return walk(state, ""), tensors


def unpack(tree: Any, tensors: dict[str, Tensor]) -> Any:
    """Puts together again what `pack` split."""
    if isinstance(tree, list):
        return [unpack(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    match tree[""]:
        case "tensor":
            return tensors[tree["at"]]
        case "pairs":
            return torch.view_as_complex(tensors[tree["at"]])
        case "dict":
            return {key: unpack(item, tensors) for key, item in tree["items"]}
        case "tuple":
            return tuple(unpack(item, tensors) for item in tree["items"])
        case kind:
            raise ValueError(f"unknown kind {kind!r}")
