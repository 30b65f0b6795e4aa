#!/bin/sh
# Builds the fake driver and runtime: seconds. Usage: build.sh OUTPUT_FOLDER
set -e
here=$(dirname "$(readlink -f "$0")"); out=${1:-$HOME/.cache/hostcuda/lib}; mkdir -p "$out"
CUDA=${CUDA_HOME:-/usr/local/cuda}
flags="-std=c++17 -O1 -g1 -fPIC -shared -I$CUDA/include -Wno-attributes"
g++ $flags "$here/hostcuda.cpp" -o "$out/libcudart.so.13" -Wl,-soname,libcudart.so.13 -Wl,--version-script="$here/libcudart.map" -ldl -lpthread
# The driver's library is empty: what it needs has the functions.
echo 'void hostcuda_driver_library(void) {}' | gcc -shared -fPIC -x c - -o "$out/libcuda.so.1" -Wl,-soname,libcuda.so.1 -Wl,--no-as-needed -L"$out" -l:libcudart.so.13 -Wl,-rpath,'$ORIGIN'
gcc -O1 -shared -fPIC "$here/nvml.c" -o "$out/libnvidia-ml.so.1" -Wl,-soname,libnvidia-ml.so.1
ln -sf libcuda.so.1 "$out/libcuda.so"
[ -f "$here/libraries.cpp" ] && g++ $flags "$here/libraries.cpp" -o "$out/libhostlibraries.so" -Wl,-soname,libhostlibraries.so -L"$out" -l:libcudart.so.13 -Wl,-rpath,'$ORIGIN'
true
