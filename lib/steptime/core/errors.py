"""The one error that a user can mend."""


class InputError(ValueError):
    """Bad input: one line naming the file, the key or row, the value and the mend. The command exits with 2."""


SLOWER, NOT_COMPARABLE = 3, 4

EXIT_STATUSES = {
    0: "Done; for a command that checks or compares: nothing was found.",
    1: "The command ran, and its answer is no: a notebook failed, parity differs, something is missing, a planted or "
    "required ratio was not met. What it is, is said on the way.",
    2: "Bad input: one line on stderr that names the file, the key or row, the value and the mend; nothing is written.",
    SLOWER: "`steptime compare`: at least one case takes longer in B than in A, or no longer runs.",
    NOT_COMPARABLE: "`steptime compare`: no verdict: different machines, runs of one case that are not of one version, "
    "or too few cases to tell a change from drift. Why is said.",
    130: "Interrupted (Ctrl+C). What was finished is kept, and the next run goes on from there.",
}
"""What `steptime` returns to the shell."""
