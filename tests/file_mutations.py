"""Ways to damage a file, and what two contents have in common."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

Draw = random.Random
Mutation = Callable[[bytes, Draw], bytes | None]
"""From content to other content, or to None for a folder in the file's place."""


def flipped(content: bytes, draw: Draw) -> bytes:
    changed = bytearray(content)
    for _ in range(draw.choice([1, 1, 1, 2, 8])):
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def truncated(content: bytes, draw: Draw) -> bytes:
    return content[: draw.choice([0, draw.randrange(len(content))])]


def inserted(content: bytes, draw: Draw) -> bytes:
    at = draw.choice([len(content), draw.randrange(len(content) + 1)])
    words = [b" ", b"\n", b"0", b'"', b"}", b",", b"\x00", b"\xff", b'{"kind": "train"}\n', b"[" * 20_000, content[:50]]
    return content[:at] + draw.choice(words) + content[at:]


def cut_out(content: bytes, draw: Draw) -> bytes:
    at = draw.randrange(len(content))
    return content[:at] + content[at + draw.choice([1, 1, 2, 10, 100]) :]


def swapped(content: bytes, draw: Draw) -> bytes:
    """Two runs of bytes change places."""
    a, b, c = sorted(draw.sample(range(len(content) + 1), 3))
    return content[:a] + content[b:c] + content[a:b] + content[c:]


def folder_instead(content: bytes, draw: Draw) -> None:
    return None


def _spots(tree: Any) -> list[tuple[Any, Any]]:
    """Containers and the keys in them, all the way down."""
    if isinstance(tree, dict):
        own: list[tuple[Any, Any]] = [(tree, key) for key in tree]
    else:
        own = [(tree, index) for index in range(len(tree))] if isinstance(tree, list) else []
    return own + [spot for container, key in own for spot in _spots(container[key])]


def _in_json(change: Callable[[Any, Any, Draw], None]) -> Mutation:
    """A change in the content, of a whole file or of one line of it, that is still JSON."""

    def mutate(content: bytes, draw: Draw) -> bytes:
        lines = content.splitlines(keepends=True)
        at = draw.randrange(len(lines)) if content.endswith(b"}\n") and content.startswith(b'{"kind') else None
        tree = json.loads(content if at is None else lines[at])
        change(*draw.choice(_spots(tree)), draw)
        if at is None:
            return json.dumps(tree, indent=2 if content.startswith(b"{\n") else None).encode() + content[-1:].strip(
                b"}"
            )
        lines[at] = json.dumps(tree).encode() + b"\n"
        return b"".join(lines)

    return mutate


def _drop(container: Any, key: Any, draw: Draw) -> None:
    del container[key]


def _retype(container: Any, key: Any, draw: Draw) -> None:
    value = container[key]
    others: list[Any] = [None, True, [], {}, "", str(value), [value], {"": value}, float("nan"), 10**400, 1e308]
    others += [float(value)] if type(value) is int else [int(value)] if type(value) is float else []
    container[key] = draw.choice(others)


def _revalue(container: Any, key: Any, draw: Draw) -> None:
    value = container[key]
    if type(value) in (int, float):
        container[key] = draw.choice([value + 1, -value - 1, value * 2 + 1, 0 if value else 7])
    elif isinstance(value, str):
        container[key] = draw.choice(["", "adding", f"{value}x", value.upper(), "\ud800"])
    else:
        container[key] = 1


def _rename(container: Any, key: Any, draw: Draw) -> None:
    if isinstance(container, dict):
        container[f"{key}_"] = container.pop(key)
    else:
        container.append(container[key])


def doubled_key(content: bytes, draw: Draw) -> bytes:
    places = [i for i in range(len(content)) if content[i : i + 1] == b"{"]
    at = draw.choice(places) + 1
    key = draw.choice([b'"step": 1, ', b'"seed": 0, ', b'"seed": 0, "seed": 0, ', b'"lr": 1.0, "lr": 0.1, '])
    return content[:at] + key + content[at:]


MUTATIONS: dict[str, Mutation] = {
    "bits flipped": flipped,
    "truncated": truncated,
    "bytes inserted": inserted,
    "bytes cut out": cut_out,
    "bytes swapped": swapped,
    "a folder instead": folder_instead,
    "key deleted": _in_json(_drop),
    "type changed": _in_json(_retype),
    "value changed": _in_json(_revalue),
    "key renamed": _in_json(_rename),
    "key doubled": doubled_key,
}


def mutated(content: bytes, draw: Draw) -> tuple[str, bytes | None]:
    """The name of a mutation and other content than was given."""
    while True:
        name = draw.choice(list(MUTATIONS))
        result = MUTATIONS[name](content, draw)
        if result != content:
            return name, result


def says_the_same(a: bytes, b: bytes | None) -> bool:
    """Whether two files hold the same JSON, down to the types, and no key twice."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len(dict(pairs)) == len(pairs)
        return dict(pairs)

    try:
        return b is not None and repr(_ordered(json.loads(b, object_pairs_hook=unique))) == repr(
            _ordered(json.loads(a))
        )
    except (ValueError, RecursionError, AssertionError):
        return False


def _ordered(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _ordered(tree[key]) for key in sorted(tree)}
    return [_ordered(item) for item in tree] if isinstance(tree, list) else tree


def put(path: Path, content: bytes | None) -> None:
    if content is None:
        path.unlink()
        path.mkdir()
    else:
        path.write_bytes(content)
