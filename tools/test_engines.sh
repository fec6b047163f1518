#!/usr/bin/env bash
# Tests against real rollout engines and trainers on the CPU: builds an environment for each under build/engines/ and
# runs tests/python/engines (vllm, sglang), tests/python/trainers (megatron, in each of its releases), its file of
# tests/python/adapters (trl, verl, verl_sglang, areal, peft) or test_ray_lab.py (ray, which needs root) in it, with the
# package of build/python.
# They run in the same Python release as the one that the package is built for.
# Usage: tools/test_engines.sh [vllm|sglang|megatron|trl|verl|verl_sglang|areal|ray|peft]... [-- PYTEST ARGUMENTS]; without names: both engines.
#
# The engines' compiled parts are not needed. Their wheels are installed without dependencies, then what the imported
# parts need; torch is held at one CPU version by a constraint, which some of the other packages would replace.
set -euo pipefail
cd "$(dirname "$0")/.."

TORCH=2.13.0
VLLM=0.33.0
SGLANG=0.5.23
TRL=1.16.0
VERL=0.9.1
AREAL=1.0.4
RAY=2.60.0
PEFT=0.21.2
MEGATRONS=(0.16.1 0.19.2)

base=("torch==$TORCH" numpy pytest packaging)
engine=("${base[@]}" psutil pyzmq pydantic "transformers>=5.16.1,<5.21" aiohttp requests openai pillow pybase64 msgspec
  uvloop apache-tvm-ffi fastapi partial-json-parser einops httpx)
sglang=(orjson triton starlette tqdm IPython dill sentencepiece loguru gguf uvicorn setproctitle jsonschema soundfile
  python-multipart)
sglang_alone=("sglang==$SGLANG" torchvision==0.28.0 compressed-tensors==0.18.0 xgrammar)
verl=("ray==$RAY" tensordict omegaconf hydra-core codetiming fastapi uvicorn pydantic orjson pyarrow pandas psutil
  cachetools peft "transformers>=5.16.1,<5.21" requests aiohttp pyzmq cbor2 openai_harmony openai pybase64 cloudpickle
  msgspec pillow uvloop prometheus-client partial_json_parser apache-tvm-ffi torchdata datasets loguru einops)

# An environment is complete when its list of requirements was written, which happens last.
prepare() {
  local directory=build/engines/$1 wanted
  # What pip resolves the dependencies of, what it installs alone, what is unpacked to directories of its own.
  local resolved alone=() unpacked=()
  local common=("${base[@]}")
  case $1 in
    vllm | sglang) common=("${engine[@]}") ;;
    megatron) unpacked=("${MEGATRONS[@]/#/megatron-core==}") ;;
  esac
  case $1 in
    vllm)
      resolved=(urllib3 regex cbor2 openai-harmony cachetools cloudpickle py-cpuinfo prometheus-client loguru orjson
        model-hosting-container-standards)
      alone=("vllm==$VLLM" compressed-tensors==0.18.0 xgrammar llguidance)
      ;;
    sglang)
      resolved=("${sglang[@]}")
      alone=("${sglang_alone[@]}")
      ;;
    trl)
      # Its clients are made only beside a vLLM.
      resolved=("trl==$TRL" requests aiohttp pyzmq cbor2 openai_harmony openai pybase64 cloudpickle msgspec pillow
        cachetools uvloop py-cpuinfo prometheus-client fastapi partial_json_parser apache-tvm-ffi)
      alone=("vllm==$VLLM" xgrammar llguidance)
      ;;
    areal)
      # What its remote engines import of its many dependencies.
      resolved=(aiohttp requests httpx tenacity uvloop "ray==$RAY" torchdata omegaconf hydra-core pybase64
        "transformers>=5.16.1,<5.21" datasets fastapi psutil pyyaml colorlog orjson tensordict safetensors flask lark
        numba pillow einops aiofiles openai)
      alone=("areal==$AREAL")
      ;;
    verl)
      # Its rollouts are made only beside a vLLM.
      resolved=("${verl[@]}" py-cpuinfo regex model-hosting-container-standards)
      alone=("verl==$VERL" "vllm==$VLLM" compressed-tensors==0.18.0 xgrammar llguidance)
      ;;
    verl_sglang)
      resolved=("${engine[@]}" "${sglang[@]}" "${verl[@]}")
      alone=("verl==$VERL" "${sglang_alone[@]}")
      ;;
    ray) resolved=("ray==$RAY") ;;
    peft) resolved=("peft==$PEFT" "transformers>=5.16.1,<5.21") ;;
    megatron) resolved=(psutil safetensors triton einops "transformers>=5.16.1,<5.21") ;;
  esac
  wanted=$(printf '%s\n' "${common[@]}" "${resolved[@]}" "${alone[@]}" "${unpacked[@]}")
  if [[ -f $directory/requirements && $(<"$directory/requirements") == "$wanted" ]]; then return; fi
  echo "test_engines: building $directory"
  rm -rf "$directory"
  python3 -m venv "$directory"
  echo "torch==$TORCH" > "$directory/constraints"
  "$directory/bin/pip" install -q -c "$directory/constraints" "${common[@]}" "${resolved[@]}"
  if ((${#alone[@]})); then "$directory/bin/pip" install -q -c "$directory/constraints" --no-deps "${alone[@]}"; fi
  for package in "${unpacked[@]}"; do
    # Newer releases are made for Python 3.12, and run on 3.11.
    "$directory/bin/pip" download -q --no-deps --only-binary=:all: --python-version 3.12 -d "$directory/$package" "$package"
    "$directory/bin/python" -m zipfile -e "$directory/$package"/*.whl "$directory/$package"
  done
  echo "$wanted" > "$directory/requirements"
}

engines=()
while [[ $# -gt 0 && $1 != -- ]]; do
  case $1 in
    vllm | sglang | megatron | trl | verl | verl_sglang | areal | ray | peft) engines+=("$1") ;;
    *)
      echo "usage: tools/test_engines.sh [vllm|sglang|megatron|trl|verl|verl_sglang|areal|ray|peft]... [-- PYTEST ARGUMENTS]" >&2
      exit 2
      ;;
  esac
  shift
done
[[ ${1:-} == -- ]] && shift
[[ ${#engines[@]} -eq 0 ]] && engines=(vllm sglang)

tools/build_python.sh
status=0
for name in "${engines[@]}"; do
  prepare "$name"
  echo "test_engines: $name"
  tests=(tests/python/engines -k "$name")
  if [[ -f tests/python/adapters/test_$name.py ]]; then tests=("tests/python/adapters/test_$name.py"); fi
  if [[ $name == ray ]]; then tests=(tests/python/test_ray_lab.py); fi
  paths=(build/python)
  if [[ $name == megatron ]]; then
    tests=(tests/python/trainers)
    paths=("${MEGATRONS[@]/#/build/python:build/engines/megatron/megatron-core==}")
  fi
  for path in "${paths[@]}"; do
    PYTHONPATH=$path "build/engines/$name/bin/python" -m pytest "${tests[@]}" -m engines -q -rs "$@" || status=1
  done
done
exit "$status"
