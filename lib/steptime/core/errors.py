"""The one error that a user can mend."""


class InputError(ValueError):
    """Bad input: one line naming the file, the key or row, the value and the mend. The command exits with 2."""
