#!/usr/bin/env bash
# A CUDA toolkit without root, of NVIDIA's wheels on PyPI (130 MB), laid out as CMake wants it. Does nothing if DIR has it.
#
#   tools/cuda_wheels.sh [DIR]                 CUDA 13, default: build/cuda. It builds everything; nothing of it runs
#                                              without a driver but tests over the emulated runtime
#   tools/cuda_wheels.sh --toolkit 12 [DIR]    default: build/cuda12. No wheel of CUDA 12 has nvcc: headers, device library
#                                              and ptxas of 12.0, for tests with clang (-DDELTASYNC_EMULATED_CUDA12)
#
#   cmake --preset release -DCMAKE_CUDA_COMPILER=$PWD/build/cuda/bin/nvcc -DCUDAToolkit_ROOT=$PWD/build/cuda
set -euo pipefail
cd "$(dirname "$0")/.."

version=13
if [[ ${1:-} == --toolkit ]]; then
  version=${2:-}
  shift 2
fi
case $version in
  12)
    to=${1:-build/cuda12} has=bin/ptxas
    wheels=(nvidia-cuda-nvcc-cu12==12.0.140 nvidia-cuda-runtime-cu12==12.0.146)
    ;;
  13)
    to=${1:-build/cuda} has=bin/nvcc
    wheels=(nvidia-cuda-nvcc==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-runtime==13.0.96
      nvidia-cuda-cccl==13.0.85)
    ;;
  *)
    echo "cuda_wheels: no wheels for CUDA '$version': 12 or 13" >&2
    exit 2
    ;;
esac

if [[ -x $to/$has ]]; then exit 0; fi
if [[ -e $to ]]; then
  echo "$to: is there, without a toolkit: remove it, or name another directory" >&2
  exit 2
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m pip download -q --no-deps --only-binary :all: -d "$work" "${wheels[@]}"
for wheel in "$work"/*.whl; do python3 -m zipfile -e "$wheel" "$work/all"; done
toolkit=$work/all/nvidia/cu13
if [[ $version == 12 ]]; then
  toolkit=$work/all/nvidia/cuda_nvcc
  cp -r "$work/all/nvidia/cuda_runtime/include/." "$toolkit/include/"
  touch "$toolkit/include/curand_mtgp32_kernel.h" # of another wheel: clang includes it, whether it is used or not
else
  chmod +x "$toolkit/nvvm/bin/cicc"
  ln -s lib "$toolkit/lib64" # where nvcc looks for it
  ln -s libcudart.so.13 "$toolkit/lib/libcudart.so" # and CMake
fi
chmod +x "$toolkit"/bin/*
mkdir -p "$(dirname "$to")"
mv "$toolkit" "$to"
"$to/$has" --version | tail -n 2
