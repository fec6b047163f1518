#!/usr/bin/env bash
# Tests against real rollout engines on the CPU: builds an environment for each under build/engines/ and runs
# tests/python/engines in it, with the package of build/python. The engines run in the same Python release as the one
# that the package is built for. Usage: tools/test_engines.sh [vllm|sglang]... [-- PYTEST ARGUMENTS]
#
# The engines' compiled parts are not needed. Their wheels are installed without dependencies, then what the imported
# parts need; torch is held at one CPU version by a constraint, which some of the other packages would replace.
set -euo pipefail
cd "$(dirname "$0")/.."

TORCH=2.13.0
VLLM=0.33.0
SGLANG=0.5.23

common=("torch==$TORCH" numpy pytest packaging psutil pyzmq pydantic "transformers>=5.16.1,<5.21" aiohttp requests
  openai pillow pybase64 msgspec uvloop apache-tvm-ffi fastapi partial-json-parser einops httpx)


# An environment is complete when its list of requirements was written, which happens last.
prepare() {
  local folder=build/engines/$1 wanted
  local resolved alone # what pip resolves the dependencies of, what it installs alone
  case $1 in
    vllm)
      resolved=(urllib3 regex cbor2 openai-harmony cachetools cloudpickle py-cpuinfo prometheus-client)
      alone=("vllm==$VLLM" xgrammar llguidance)
      ;;
    sglang)
      resolved=(orjson triton starlette tqdm IPython dill sentencepiece loguru gguf uvicorn setproctitle jsonschema
        soundfile python-multipart)
      alone=("sglang==$SGLANG" torchvision==0.28.0 compressed-tensors==0.18.0 xgrammar)
      ;;
  esac
  wanted=$(printf '%s\n' "${common[@]}" "${resolved[@]}" "${alone[@]}")
  if [[ -f $folder/requirements && $(<"$folder/requirements") == "$wanted" ]]; then return; fi
  echo "test_engines: building $folder"
  rm -rf "$folder"
  python3 -m venv "$folder"
  echo "torch==$TORCH" > "$folder/constraints"
  "$folder/bin/pip" install -q -c "$folder/constraints" "${common[@]}" "${resolved[@]}"
  "$folder/bin/pip" install -q -c "$folder/constraints" --no-deps "${alone[@]}"
  echo "$wanted" > "$folder/requirements"
}

engines=()
while [[ $# -gt 0 && $1 != -- ]]; do
  case $1 in
    vllm | sglang) engines+=("$1") ;;
    *)
      echo "usage: tools/test_engines.sh [vllm|sglang]... [-- PYTEST ARGUMENTS]" >&2
      exit 2
      ;;
  esac
  shift
done
[[ ${1:-} == -- ]] && shift
[[ ${#engines[@]} -eq 0 ]] && engines=(vllm sglang)

tools/build_python.sh
status=0
for engine in "${engines[@]}"; do
  prepare "$engine"
  echo "test_engines: $engine"
  PYTHONPATH=build/python "build/engines/$engine/bin/python" -m pytest tests/python/engines -m engines -k "$engine" \
    -q -rs "$@" || status=1
done
exit "$status"
