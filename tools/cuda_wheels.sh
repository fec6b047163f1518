#!/usr/bin/env bash
# A CUDA 13 toolkit without root: nvcc and what it needs, from NVIDIA's wheels on PyPI (130 MB), laid out as CMake wants it.
# It builds everything; nothing of it runs without a driver but tests over the emulated runtime. There is none for CUDA 12:
# its wheels have no nvcc. Does nothing if DIR has a toolkit.
#
#   tools/cuda_wheels.sh [DIR]    default: build/cuda
#   cmake --preset release -DCMAKE_CUDA_COMPILER=$PWD/build/cuda/bin/nvcc -DCUDAToolkit_ROOT=$PWD/build/cuda
set -euo pipefail
cd "$(dirname "$0")/.."

to=${1:-build/cuda}
wheels=(nvidia-cuda-nvcc==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-runtime==13.0.96
  nvidia-cuda-cccl==13.0.85)

if [[ -x $to/bin/nvcc ]]; then exit 0; fi
if [[ -e $to ]]; then
  echo "$to: is there, without a toolkit: remove it, or name another directory" >&2
  exit 2
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m pip download -q --no-deps --only-binary :all: -d "$work" "${wheels[@]}"
for wheel in "$work"/*.whl; do python3 -m zipfile -e "$wheel" "$work/all"; done
toolkit=$work/all/nvidia/cu13
chmod +x "$toolkit"/bin/* "$toolkit/nvvm/bin/cicc"
ln -s lib "$toolkit/lib64" # where nvcc looks for it
ln -s libcudart.so.13 "$toolkit/lib/libcudart.so" # and CMake
mkdir -p "$(dirname "$to")"
mv "$toolkit" "$to"
"$to/bin/nvcc" --version | tail -n 2
