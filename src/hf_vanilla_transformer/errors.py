"""The one exception for mistakes of the person at the keyboard."""


class UserError(ValueError):
    """A mistake in the input: the message is one line that names the file, line or value and what to do.

    The command line prints the message and exits with 2; anything else that escapes is a bug and keeps its
    traceback.
    """
