"""What mpirun uses in the place of ssh: run a command in the network namespace of the host of that address.

Run as `python enter.py ADDRESS COMMAND...`; STEPTIME_HOSTS is JSON, {address: namespace}. Standard library only.
"""

import json
import os
import sys

import boot


def main():
    boot.end_with_mpi()
    boot.enter(json.loads(os.environ["STEPTIME_HOSTS"])[sys.argv[1]])
    # Without a shell in between, the daemon itself ends with mpirun.
    os.execv("/bin/sh", ["/bin/sh", "-c", "exec " + " ".join(sys.argv[2:]).strip()])


if __name__ == "__main__":
    main()
