"""Becomes a rank's command: tied to the launcher's life, inside its network namespace.

Run as `python boot.py PARENT NAMESPACE COMMAND...`: PARENT the launcher's process id, NAMESPACE a name under /run/netns
or empty. Standard library only.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
CLONE_NEWNET = 0x40000000


def main():
    parent, namespace, command = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    libc = ctypes.CDLL(None, use_errno=True)
    # Kept over exec: the rank ends when the launcher's thread that started it ends, however that ends.
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    if namespace:
        handle = os.open("/run/netns/" + namespace, os.O_RDONLY | os.O_CLOEXEC)
        if libc.setns(handle, CLONE_NEWNET):
            sys.exit("network namespace %s: cannot be entered (%s)" % (namespace, os.strerror(ctypes.get_errno())))
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit("%s: cannot be started (%s)" % (command[0], error.strerror))


if __name__ == "__main__":
    main()
