# Cross-compiles for arm64 Linux with Debian's compiler and the libraries under DELTASYNC_ARM64_ROOT
# (tools/ci/check_arm64.sh makes it). Tests run under qemu-user.
if(NOT DELTASYNC_ARM64_ROOT)
  set(DELTASYNC_ARM64_ROOT "$ENV{DELTASYNC_ARM64_ROOT}")  # compilers are tried in projects that have no such variable
endif()
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_LIBRARY_ARCHITECTURE aarch64-linux-gnu)
set(CMAKE_SYSROOT "${DELTASYNC_ARM64_ROOT}")
set(CMAKE_FIND_ROOT_PATH "${DELTASYNC_ARM64_ROOT}")
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE ONLY)
set(CMAKE_CROSSCOMPILING_EMULATOR "qemu-aarch64;-L;${DELTASYNC_ARM64_ROOT}")
