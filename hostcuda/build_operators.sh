#!/bin/sh
# Builds the operators against the torch of a virtual environment: two minutes. Usage: build_operators.sh VENV [OUTPUT_FOLDER]
set -e
here=$(dirname "$(readlink -f "$0")"); site=$1/lib/python3.11/site-packages; out=${2:-$HOME/.cache/hostcuda/lib}
CUDA=${CUDA_HOME:-/usr/local/cuda}
g++ -std=c++20 -O1 -fPIC -shared -w -I$site/torch/include -I$site/torch/include/torch/csrc/api/include -I$site/nvidia/cu13/include -I$CUDA/include "$here/operators.cpp" -o "$out/libhostoperators.so" \
  -L$site/torch/lib -L"$out" -ltorch_cuda -lc10_cuda -ltorch_cpu -lc10 -l:libcudart.so.13 -Wl,-rpath,'$ORIGIN' -Wl,--allow-shlib-undefined
