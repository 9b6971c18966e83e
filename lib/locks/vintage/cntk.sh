#!/usr/bin/env bash
# CNTK was linked with an older OpenMPI: give it Debian's under the names that it looks for, in a folder of its own.
set -euo pipefail
mkdir -p lib-links
for pair in libmpi.so.40:libmpi.so.12 libmpi_cxx.so.40:libmpi_cxx.so.1; do
  path=$(PATH=$PATH:/sbin:/usr/sbin ldconfig -p | sed -n "s|.*${pair%:*} .*x86-64.* => ||p" | head -n 1)
  ln -sf "${path:?${pair%:*} is not installed}" "lib-links/${pair#*:}"
done
LD_LIBRARY_PATH=$PWD/lib-links bin/python -c 'import cntk'
