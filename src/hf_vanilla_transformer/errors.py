"""The one exception for mistakes of the person at the keyboard, and what many places that raise it need."""

from pathlib import Path


class UserError(ValueError):
    """A mistake in the input: the message is one line that names the file, line or value and what to do.

    The command line prints the message and exits with 2; anything else that escapes is a bug and keeps its
    traceback.
    """


def on_one_line(error: BaseException) -> str:
    """All that it says, or else what it is."""
    return " ".join(str(error).split()) or type(error).__name__


def first_line(error: BaseException) -> str:
    """Of what it says, or else what it is: for errors that explain at length."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def require_folder_path(path: Path) -> None:
    """Raises UserError if what is or shall be a folder, or one above it, is a file."""
    for part in (path, *path.parents):
        if part.is_file():
            raise UserError(f"{part} is a file: name another folder")
