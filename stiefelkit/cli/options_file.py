"""Options from a TOML file."""

import tomllib
from pathlib import Path

from cyclopts.config import Dict

from stiefelkit.errors import OptionError

__all__ = ["read_options"]


def read_options(path: Path) -> Dict:
    """Returns the options in a TOML file, for cyclopts to put under those of the command line.

    Keys are the options without their dashes in front, `hidden-size = 96` or `hidden_size = 96`; tables hold the
    options with a dot, `[rates]` `skew = 1e-4`.

    Raises:
        OptionError: the file cannot be read, or is no TOML.
    """
    try:
        options = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(f"--config needs a readable file, got {path}: {error.strerror}.") from error
    except ValueError as error:
        raise OptionError(f"--config needs valid TOML, got {path}: {error}.") from error
    return Dict(data=options, source=str(path), use_commands_as_keys=False)
