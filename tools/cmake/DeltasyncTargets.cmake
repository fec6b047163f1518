# How every target of the project is built: warnings as errors, sanitizers, ccache.
option(DELTASYNC_WERROR "Warnings are errors; OFF for compilers that the project is not tested with"
       ${PROJECT_IS_TOP_LEVEL})

find_program(DELTASYNC_CCACHE ccache)
if(DELTASYNC_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_C_COMPILER_LAUNCHER ${DELTASYNC_CCACHE})
  set(CMAKE_CXX_COMPILER_LAUNCHER ${DELTASYNC_CCACHE})
  if(NOT CMAKE_DISABLE_PRECOMPILE_HEADERS)  # or it would not keep what is compiled with them
    list(PREPEND CMAKE_CXX_COMPILER_LAUNCHER env CCACHE_SLOPPINESS=pch_defines,time_macros)
  endif()
endif()

# Two hundred test programs with sanitizers: GNU's linker takes four times as long for each.
if(DELTASYNC_SANITIZE)
  find_program(DELTASYNC_LLD NAMES ld.lld ld.lld-14)
  if(DELTASYNC_LLD AND CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
    add_link_options(-fuse-ld=lld)
  endif()
endif()

add_library(deltasync_options INTERFACE)
if(DELTASYNC_PORTABLE)  # a wheel brings its libraries along: only what is called of them, and of this one
  target_compile_options(deltasync_options INTERFACE -ffunction-sections -fdata-sections)
  target_link_options(deltasync_options INTERFACE -Wl,--gc-sections)
  find_program(DELTASYNC_GOLD NAMES ld.gold)
endif()
target_include_directories(deltasync_options INTERFACE ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src
                                                       ${PROJECT_SOURCE_DIR})
target_compile_options(
  deltasync_options
  INTERFACE -Wall -Wextra -Wpedantic -Wshadow -Wnon-virtual-dtor -Woverloaded-virtual -Wcast-align -Wunused
            -Wnull-dereference -Wimplicit-fallthrough $<$<BOOL:${DELTASYNC_WERROR}>:-Werror> -fno-omit-frame-pointer)
if(CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
  target_compile_options(deltasync_options INTERFACE -Wthread-safety)
else()
  # Asio's memory fences are unknown to g++'s ThreadSanitizer, which only warns about them; -Wnull-dereference,
  # -Wmaybe-uninitialized, -Wrestrict, -Wstringop-overflow and -Warray-bounds (g++ 14) give false alarms inside inlined
  # standard headers at -O3, -Wmismatched-new-delete one in every coroutine frame of Asio's under AddressSanitizer.
  target_compile_options(deltasync_options INTERFACE -Wno-null-dereference -Wno-maybe-uninitialized -Wno-restrict
                                                     -Wno-stringop-overflow -Wno-array-bounds
                                                     -Wno-mismatched-new-delete)
endif()
if(DELTASYNC_SANITIZE STREQUAL "address+undefined")
  # vptr looks at memory through a pipe, and so raises false alarms in tests that use up the descriptors.
  target_compile_options(deltasync_options INTERFACE -fsanitize=address,undefined -fno-sanitize=vptr
                                                     -fno-sanitize-recover=all)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
    # Asks for run-time type information on both sides of a call, which C libraries and std::function do not have.
    target_compile_options(deltasync_options INTERFACE -fno-sanitize=function)
  endif()
  target_link_options(deltasync_options INTERFACE -fsanitize=address,undefined)
elseif(DELTASYNC_SANITIZE STREQUAL "thread")
  target_compile_options(deltasync_options INTERFACE -fsanitize=thread)
  target_link_options(deltasync_options INTERFACE -fsanitize=thread)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    target_compile_options(deltasync_options INTERFACE -Wno-tsan)
  endif()
elseif(DELTASYNC_SANITIZE)
  message(FATAL_ERROR "DELTASYNC_SANITIZE: unknown value ${DELTASYNC_SANITIZE}")
endif()

# What parses a command line or asserts costs the compiler much and the user no time: such code is optimized little, under
# sanitizers not at all. The libraries that it calls have the flags of the build.
if(DELTASYNC_SANITIZE)
  set(DELTASYNC_COLD -O0)
elseif(DELTASYNC_PORTABLE)
  set(DELTASYNC_COLD -Os)
elseif(CMAKE_BUILD_TYPE STREQUAL "Release")
  set(DELTASYNC_COLD -O1)
endif()

# In a unity build many sources are compiled as one, which takes a third of the time. To g++ what such a source includes is a
# header, and an unnamed namespace in a header a mistake.
set(unity_options)
if(CMAKE_UNITY_BUILD AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  set(unity_options -Wno-subobject-linkage)
endif()

# Two hundred test programs with sanitizers, each with the libraries in it, would fill five gigabytes.
set(DELTASYNC_LIBRARY_KIND STATIC)
if(DELTASYNC_SANITIZE)
  set(DELTASYNC_LIBRARY_KIND SHARED)
endif()

# deltasync_library(NAME SOURCES a.cpp … DEPENDS target …): a static library, one per layer. Those of tests are built only
# where a test is that links them.
# SMALL: no loop of it goes over weights, so that wheels, which have most libraries twice, have it compiled for size.
# SMALL_SOURCES: none of these has such a loop.
function(deltasync_library name)
  cmake_parse_arguments(ARG "SMALL" "" "SOURCES;SMALL_SOURCES;DEPENDS" ${ARGN})
  add_library(${name} ${DELTASYNC_LIBRARY_KIND} ${ARG_SOURCES} ${ARG_SMALL_SOURCES})
  target_link_libraries(${name} PUBLIC deltasync_options ${ARG_DEPENDS})
  target_compile_options(${name} PRIVATE ${unity_options})
  if(ARG_SMALL AND DELTASYNC_PORTABLE)
    target_compile_options(${name} PRIVATE -Os)
  elseif(DELTASYNC_PORTABLE)
    set_source_files_properties(${ARG_SMALL_SOURCES} PROPERTIES COMPILE_OPTIONS -Os)
  endif()
  if(DELTASYNC_LIBRARIES_IF_USED)
    set_target_properties(${name} PROPERTIES EXCLUDE_FROM_ALL ON)
  endif()
endfunction()

# deltasync_executable(NAME SOURCES … DEPENDS …)
function(deltasync_executable name)
  cmake_parse_arguments(ARG "" "" "SOURCES;DEPENDS" ${ARGN})
  add_executable(${name} ${ARG_SOURCES})
  if(DELTASYNC_PORTABLE AND DELTASYNC_GOLD)  # functions that are the same, of which templates make many, are kept once
    target_link_options(${name} PRIVATE -fuse-ld=gold -Wl,--icf=safe)
  endif()
  target_link_libraries(${name} PRIVATE deltasync_options ${ARG_DEPENDS})
  target_compile_options(${name} PRIVATE ${unity_options})
endfunction()

# A release build and one with sanitizers may share the tests, as .ci/run's do (tools/test.sh --share): each then runs those
# that can show something there. The others are disabled in it, and their programs not built.
option(DELTASYNC_SHARE_TESTS "Leave tests to the other one of a release build and a build with sanitizers" OFF)

# deltasync_test_in(NAME WHERE): of builds that share the tests, this one runs in
#   sanitizers  what goes wrong with memory shows there: a test of C++ code, unless it says otherwise
#   release     nothing to see with sanitizers: it walks states on plain data, or reads text; or a device is wanted
#   both        it may depend on the compiler, the instruction set or the timing, or runs programs as users have them
function(deltasync_test_in name where)
  if(DELTASYNC_SANITIZE)
    set(here sanitizers)
  else()
    set(here release)
  endif()
  if(NOT where MATCHES "^(sanitizers|release|both)$")
    message(FATAL_ERROR "${name}: in which build? ${where}")
  endif()
  if(NOT DELTASYNC_SHARE_TESTS OR where STREQUAL "both" OR where STREQUAL here)
    return()
  endif()
  set_tests_properties(${name} PROPERTIES DISABLED ON)
  if(TARGET ${name})
    set_target_properties(${name} PROPERTIES EXCLUDE_FROM_ALL ON)
  endif()
endfunction()

# Headers that most tests include are compiled once for all tests that have the same flags. Presets for those who edit one
# test do without (CMAKE_DISABLE_PRECOMPILE_HEADERS): a source has to name what it uses.
set(test_headers <gmock/gmock-matchers.h> <gtest/gtest.h>)
foreach(header IN ITEMS algorithm array atomic chrono condition_variable deque filesystem fstream functional future map
                        memory mutex optional random set span sstream string thread utility vector)
  list(APPEND test_headers <${header}>)
endforeach()
function(deltasync_precompiled_test_headers name)
  if(CMAKE_DISABLE_PRECOMPILE_HEADERS)
    return()
  endif()
  set(headers deltasync_test_headers${DELTASYNC_COLD})
  if(NOT TARGET ${headers})
    add_executable(${headers} EXCLUDE_FROM_ALL ${PROJECT_SOURCE_DIR}/tests/support/headers.cpp)
    target_link_libraries(${headers} PRIVATE deltasync_options GTest::gtest GTest::gmock)
    target_compile_options(${headers} PRIVATE ${DELTASYNC_COLD})
    target_precompile_headers(${headers} PRIVATE ${test_headers})
  endif()
  target_precompile_headers(${name} REUSE_FROM ${headers})
endfunction()

# deltasync_test(NAME SOURCES … DEPENDS … [LABELS …] [IN WHERE]): one GoogleTest executable = one ctest test. Directories
# whose tests compare much memory themselves set DELTASYNC_COLD to nothing; those whose tests run in another build than
# `sanitizers` set DELTASYNC_TESTS_IN.
function(deltasync_test name)
  cmake_parse_arguments(ARG "" "IN" "SOURCES;DEPENDS;LABELS" ${ARGN})
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE deltasync_options ${ARG_DEPENDS} GTest::gtest GTest::gmock GTest::gtest_main)
  target_compile_options(${name} PRIVATE ${DELTASYNC_COLD})
  deltasync_precompiled_test_headers(${name})
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/tests)
  add_test(NAME ${name} COMMAND ${name})
  if(DELTASYNC_SANITIZE)
    target_compile_definitions(${name} PRIVATE DELTASYNC_SANITIZED)  # for tests that only repeat themselves
  endif()
  set_tests_properties(${name} PROPERTIES LABELS "${ARG_LABELS}")
  if("gpu" IN_LIST ARG_LABELS)
    add_dependencies(gpu_tests ${name})
    set(ARG_IN release)
  elseif(NOT ARG_IN)
    set(ARG_IN ${DELTASYNC_TESTS_IN})
  endif()
  deltasync_test_in(${name} ${ARG_IN})
endfunction()

# deltasync_gpu_test(NAME … [QUICK filter]): NAME_cuda, which wants a real device (label gpu), and NAME_emulated: the same
# objects over an emulated CUDA runtime, so that the kernels run without a device. Where that takes minutes, ctest runs what
# QUICK lets through, tools/test.sh gpu all of it, and sanitizers, with which it takes ten times as long, nothing.
function(deltasync_gpu_test name)
  cmake_parse_arguments(ARG "" "QUICK" "SOURCES;DEPENDS" ${ARGN})
  add_library(${name}_objects OBJECT ${ARG_SOURCES})
  target_link_libraries(${name}_objects PRIVATE deltasync_options ${ARG_DEPENDS} GTest::gtest GTest::gmock)
  target_compile_options(${name}_objects PRIVATE ${DELTASYNC_COLD})
  target_compile_definitions(${name}_objects PRIVATE DELTASYNC_TEST_CUDA
                                                     $<$<BOOL:${DELTASYNC_SANITIZE}>:DELTASYNC_SANITIZED>)
  deltasync_test(${name}_cuda SOURCES $<TARGET_OBJECTS:${name}_objects> DEPENDS ${ARG_DEPENDS} LABELS gpu)
  set_target_properties(${name}_cuda PROPERTIES LINKER_LANGUAGE CXX)
  if(DELTASYNC_WITH_EMULATOR AND NOT (DELTASYNC_SANITIZE AND ARG_QUICK))
    deltasync_emulated_test(${name}_emulated SOURCES $<TARGET_OBJECTS:${name}_objects> DEPENDS ${ARG_DEPENDS})
    if(ARG_QUICK)
      set_tests_properties(${name}_emulated PROPERTIES ENVIRONMENT "GTEST_FILTER=${ARG_QUICK}")
    endif()
  endif()
endfunction()

# deltasync_emulated_test(NAME SOURCES … DEPENDS … [KERNELS target] [DEVICE target] [TOOLKIT suffix]): a program whose CUDA
# runtime is tests/gpu/emulator; with another TOOLKIT (deltasync_emulated_cuda), kernels are among SOURCES.
function(deltasync_emulated_test name)
  cmake_parse_arguments(ARG "" "KERNELS;DEVICE;TOOLKIT" "SOURCES;DEPENDS" ${ARGN})
  if(NOT ARG_KERNELS AND NOT ARG_TOOLKIT)
    set(ARG_KERNELS deltasync_emulated_kernels)
  endif()
  if(NOT ARG_DEVICE)
    set(ARG_DEVICE deltasync_emulated_device${ARG_TOOLKIT})
  endif()
  foreach(objects deltasync_emulated_runtime${ARG_TOOLKIT} ${ARG_DEVICE} ${ARG_KERNELS})
    list(APPEND ARG_SOURCES $<TARGET_OBJECTS:${objects}>)
  endforeach()
  deltasync_test(${name} SOURCES ${ARG_SOURCES} DEPENDS ${ARG_DEPENDS} deltasync_ptx IN release)
  # Without CUDA's own runtime (src/gpu/CMakeLists.txt): a call that is not emulated does not link.
  set_target_properties(${name} PROPERTIES DELTASYNC_EMULATED ON LINKER_LANGUAGE CXX)
endfunction()
