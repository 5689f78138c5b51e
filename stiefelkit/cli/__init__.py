"""The command `stiefelkit`: it parses, calls `stiefelkit.experiments` and prints.

Nothing here imports torch or matplotlib before a command needs them.
"""

import signal
import sys
from collections.abc import Sequence

from stiefelkit.errors import StiefelkitError

__all__ = ["main"]

USER_ERROR = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line.

    An error that the user can mend is one sentence on standard error; any other keeps its traceback.

    Args:
        arguments: the words after the program's name; those of the process if left out.

    Returns:
        The exit code: 0, 2 after an error of the user, 128 + n after signal n.
    """
    from cyclopts import CycloptsError

    from stiefelkit.cli.app import app

    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = app.meta(words, exit_on_error=False, print_error=False, result_action="return_value")
    except StiefelkitError as error:
        return _refuse(str(error))
    except CycloptsError as error:
        return _refuse(str(error))
    except KeyboardInterrupt:
        print("Stopped at once; the last checkpoint is kept.", file=sys.stderr)
        return 128 + signal.SIGINT
    return code if isinstance(code, int) else 0


def _refuse(sentence: str) -> int:
    print("Error:", " ".join(sentence.split()), file=sys.stderr)
    return USER_ERROR
