"""Becomes a rank's command: tied to the launcher's life, inside its network namespace.

Run as `python boot.py PARENT NAMESPACE COMMAND...`: PARENT the launcher's process id, NAMESPACE a name under /run/netns
or empty. Standard library only; Python >= 3.6.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
CLONE_NEWNET = 0x40000000
STARTERS = ("mpirun", "mpiexec", "orterun", "orted")
LIBC = ctypes.CDLL(None, use_errno=True)


def end_with_parent():
    """Have the kernel end this process when the thread that started it ends, however that ends. Kept over exec."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def end_with_mpi():
    """The same for a process that a program of OpenMPI has started; end now if that has gone already."""
    end_with_parent()
    with open("/proc/%d/comm" % os.getppid()) as file:
        if file.read().strip() not in STARTERS:
            os._exit(1)


def enter(namespace):
    """Be in the network namespace of that name."""
    handle = os.open("/run/netns/" + namespace, os.O_RDONLY | os.O_CLOEXEC)
    if LIBC.setns(handle, CLONE_NEWNET):
        sys.exit("network namespace %s: cannot be entered (%s)" % (namespace, os.strerror(ctypes.get_errno())))


def main():
    parent, namespace, command = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    end_with_parent()
    if os.getppid() != parent:
        os._exit(1)
    if namespace:
        enter(namespace)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit("%s: cannot be started (%s)" % (command[0], error.strerror))


if __name__ == "__main__":
    main()
