#!/usr/bin/env bash
# Build Caffe 1.0.0 (BVLC, CPU only) in the current environment's folder. Run by `steptime env create caffe`.
#
# Its source is in the source distribution of brocolli-caffe, whose own setup.py builds with conda only; so its CMake is
# driven here. Interrupted, make goes on where it was.
set -euo pipefail
python=$PWD/bin/python
source=$PWD/build/source

if [[ ! -d $source ]]; then
  rm -rf build
  mkdir build
  "$python" -m pip download -q --no-deps --no-build-isolation --no-binary :all: --dest build brocolli-caffe==9.0.2
  mkdir build/unpacked
  tar -xzf build/brocolli-caffe-9.0.2.tar.gz -C build/unpacked --strip-components 1
  # Debian's Boost.Python is named after the version; the files that the last step links are copied below.
  sed -i -e 's/-lboost_python /-lboost_python311 /' -e 's/^if(UNIX OR APPLE)/if(FALSE)/' \
    build/unpacked/python/CMakeLists.txt
  mv build/unpacked "$source"
fi

folders=$("$python" -c 'import numpy, sysconfig; print(sysconfig.get_path("include"), numpy.get_include(), sep=":")')
export CPATH=$folders:/usr/include/hdf5/serial
LIBRARY_PATH=$(dirname /usr/lib/*/hdf5/serial/libhdf5.so)
export LIBRARY_PATH

cmake -S "$source" -B build/objects -DCMAKE_BUILD_TYPE=Release -DCMAKE_POLICY_VERSION_MINIMUM=3.5 -Wno-dev
cmake --build build/objects --target pycaffe --parallel 2

# `caffe time` from the same objects, for comparing with Caffe's own benchmark.
mapfile -d '' objects < <(find build/objects -path '*pycaffe.dir*' -name '*.o' ! -name '_caffe.cpp.o' -print0)
c++ -O3 -DNDEBUG -DCPU_ONLY=1 -DCAFFE_VERSION=1.0.0 -std=c++14 -w -I build/objects/include -I build/objects \
  -I "$source/include" -o bin/caffe "$source/tools/caffe.cpp" "${objects[@]}" build/objects/lib/libproto.a \
  -lglog -lgflags -lprotobuf -lboost_thread -lboost_system -lboost_filesystem -lboost_regex -lhdf5_hl -lhdf5 \
  -lopenblas -lpthread

# Installed as a distribution, so that its version can be read without importing it.
rm -rf build/package
mkdir -p build/package/caffe/proto
cp "$source"/python/caffe/*.py build/package/caffe/
find build/objects -name 'caffe_pb2.py' -exec cp {} build/package/caffe/proto/ \;
touch build/package/caffe/proto/__init__.py
cp build/objects/lib/_caffe.so build/package/caffe/
cat >build/package/setup.py <<'SETUP'
from setuptools import setup

setup(name="caffe", version="1.0.0", packages=["caffe", "caffe.proto"], package_data={"caffe": ["_caffe.so"]})
SETUP
"$python" -m pip install -q --no-deps --no-build-isolation --force-reinstall ./build/package
"$python" -c 'import caffe; assert caffe.__version__ == "1.0.0", caffe.__version__'
rm -rf build
