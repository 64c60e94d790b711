"""The one exception for mistakes of the person at the keyboard, and a check that many places need."""

from pathlib import Path


class UserError(ValueError):
    """A mistake in the input: the message is one line that names the file, line or value and what to do.

    The command line prints the message and exits with 2; anything else that escapes is a bug and keeps its
    traceback.
    """


def require_folder_path(path: Path) -> None:
    """Raises UserError if what is or shall be a folder, or one above it, is a file."""
    for part in (path, *path.parents):
        if part.is_file():
            raise UserError(f"{part} is a file: name another folder")
