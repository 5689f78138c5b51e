"""The command line, as it explains itself. Needs no Sphinx."""

import contextlib
import io
import os


def commands():
    """Returns the words of every command, "train digits", with the application behind them."""
    from stiefelkit.cli.app import app
    from stiefelkit.cli.runs import add_tasks

    add_tasks()

    def below(parent, path):
        for name in parent:
            if not name.startswith("-"):
                yield (*path, name), parent[name]
                yield from below(parent[name], (*path, name))

    return dict(below(app, ()))


def explained(path):
    """What `stiefelkit ... --help` prints, on 88 columns without colours."""
    from stiefelkit.cli import main

    printed, before = io.StringIO(), dict(os.environ)
    os.environ |= {"COLUMNS": "88", "NO_COLOR": "1", "TERM": "dumb"}
    try:
        with contextlib.redirect_stdout(printed):
            main([*path, "--help"])
    finally:
        os.environ.clear()
        os.environ.update(before)
    return "\n".join(line.rstrip() for line in printed.getvalue().splitlines())


def page():
    """The page of all commands."""
    lines = [
        "# Commands",
        "",
        "What each command prints with `--help`. [Command line](../../cli.md) shows how they go together.",
        "",
    ]
    for path in [(), *commands()]:
        lines += [f"## stiefelkit {' '.join(path)}".rstrip(), "", "```text", explained(path).rstrip(), "```", ""]
    return "\n".join(lines)
