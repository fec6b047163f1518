# How every target of the project is built: warnings as errors, sanitizers, ccache.
option(DELTASYNC_WERROR "Warnings are errors; OFF for compilers that the project is not tested with"
       ${PROJECT_IS_TOP_LEVEL})

find_program(DELTASYNC_CCACHE ccache)
if(DELTASYNC_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_C_COMPILER_LAUNCHER ${DELTASYNC_CCACHE})
  set(CMAKE_CXX_COMPILER_LAUNCHER ${DELTASYNC_CCACHE})
endif()

add_library(deltasync_options INTERFACE)
if(DELTASYNC_PORTABLE)  # a wheel brings its libraries along: only what is called of them, and of this one
  target_compile_options(deltasync_options INTERFACE -ffunction-sections -fdata-sections)
  target_link_options(deltasync_options INTERFACE -Wl,--gc-sections)
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
elseif(CMAKE_BUILD_TYPE STREQUAL "Release")
  set(DELTASYNC_COLD -O1)
endif()

# In a unity build many sources are compiled as one, which takes a third of the time. To g++ what such a source includes is a
# header, and an unnamed namespace in a header a mistake.
set(unity_options)
if(CMAKE_UNITY_BUILD AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  set(unity_options -Wno-subobject-linkage)
endif()

# deltasync_library(NAME SOURCES a.cpp … DEPENDS target …): a static library, one per layer.
function(deltasync_library name)
  cmake_parse_arguments(ARG "" "" "SOURCES;DEPENDS" ${ARGN})
  add_library(${name} STATIC ${ARG_SOURCES})
  target_link_libraries(${name} PUBLIC deltasync_options ${ARG_DEPENDS})
  target_compile_options(${name} PRIVATE ${unity_options})
endfunction()

# deltasync_executable(NAME SOURCES … DEPENDS …)
function(deltasync_executable name)
  cmake_parse_arguments(ARG "" "" "SOURCES;DEPENDS" ${ARGN})
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE deltasync_options ${ARG_DEPENDS})
  target_compile_options(${name} PRIVATE ${unity_options})
endfunction()

# deltasync_test(NAME SOURCES … DEPENDS … [LABELS …]): one GoogleTest executable = one ctest test. Directories whose tests
# compare much memory themselves set DELTASYNC_COLD to nothing.
function(deltasync_test name)
  cmake_parse_arguments(ARG "" "" "SOURCES;DEPENDS;LABELS" ${ARGN})
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE deltasync_options ${ARG_DEPENDS} GTest::gtest GTest::gmock GTest::gtest_main)
  target_compile_options(${name} PRIVATE ${DELTASYNC_COLD})
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/tests)
  add_test(NAME ${name} COMMAND ${name})
  if(DELTASYNC_SANITIZE)
    target_compile_definitions(${name} PRIVATE DELTASYNC_SANITIZED)  # for tests that only repeat themselves
  endif()
  set_tests_properties(${name} PROPERTIES LABELS "${ARG_LABELS}")
  if("gpu" IN_LIST ARG_LABELS)
    add_dependencies(gpu_tests ${name})
  endif()
endfunction()

# deltasync_gpu_test(NAME …): NAME_cuda, which wants a real device (label gpu), and NAME_standin: the same objects with
# tests/gpu/standin_device.cpp for a device, so that what is asked of a real one is seen to hold without one.
function(deltasync_gpu_test name)
  cmake_parse_arguments(ARG "" "" "SOURCES;DEPENDS" ${ARGN})
  add_library(${name}_objects OBJECT ${ARG_SOURCES})
  target_link_libraries(${name}_objects PRIVATE deltasync_options ${ARG_DEPENDS} GTest::gtest GTest::gmock)
  target_compile_options(${name}_objects PRIVATE ${DELTASYNC_COLD})
  target_compile_definitions(${name}_objects PRIVATE DELTASYNC_TEST_CUDA
                                                     $<$<BOOL:${DELTASYNC_SANITIZE}>:DELTASYNC_SANITIZED>)
  deltasync_test(${name}_cuda SOURCES $<TARGET_OBJECTS:${name}_objects> DEPENDS ${ARG_DEPENDS} LABELS gpu)
  deltasync_test(
    ${name}_standin
    SOURCES ${PROJECT_SOURCE_DIR}/tests/gpu/standin_device.cpp $<TARGET_OBJECTS:${name}_objects>
    DEPENDS ${ARG_DEPENDS})
  set_target_properties(${name}_cuda PROPERTIES LINKER_LANGUAGE CXX)
endfunction()
