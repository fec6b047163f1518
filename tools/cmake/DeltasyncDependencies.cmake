# Third-party libraries, all from Debian packages (tools/install_deps.sh), as imported targets. A project that has this one
# inside sees them as well: it links what the library needs.
set(CMAKE_FIND_PACKAGE_TARGETS_GLOBAL ON)

# A wheel goes to systems that have none of these packages: what has a static library is linked from that, and
# tools/build_wheels.sh bundles the rest.
option(DELTASYNC_PORTABLE "Link static libraries, for systems that have none of these packages, or an older libstdc++" OFF)
if(DELTASYNC_PORTABLE)
  list(PREPEND CMAKE_FIND_LIBRARY_SUFFIXES ${CMAKE_STATIC_LIBRARY_SUFFIX})
endif()

find_package(Threads REQUIRED)
find_package(PkgConfig REQUIRED)
set(Boost_NO_WARN_NEW_VERSIONS ON)
if(POLICY CMP0167)
  cmake_policy(SET CMP0167 OLD)  # Debian's Boost 1.81 is found by CMake's own module as well as by its config
endif()
find_package(Boost 1.81 REQUIRED)
find_package(fmt REQUIRED)
find_package(spdlog REQUIRED)
find_package(nlohmann_json 3.11 REQUIRED)
find_package(OpenSSL 3 REQUIRED)

# What logs, and no other code, is compiled with spdlog and fmt inside (src/base/log.cpp): who links the library needs neither.
add_library(deltasync_spdlog INTERFACE)
target_compile_definitions(deltasync_spdlog INTERFACE SPDLOG_FMT_EXTERNAL FMT_HEADER_ONLY)
foreach(library IN ITEMS spdlog::spdlog_header_only fmt::fmt-header-only)
  target_include_directories(deltasync_spdlog SYSTEM INTERFACE $<TARGET_PROPERTY:${library},INTERFACE_INCLUDE_DIRECTORIES>)
endforeach()

pkg_check_modules(XXHASH REQUIRED IMPORTED_TARGET GLOBAL libxxhash>=0.8)
pkg_check_modules(ZSTD REQUIRED IMPORTED_TARGET GLOBAL libzstd>=1.5)
find_path(TOMLPLUSPLUS_INCLUDE_DIR toml++/toml.h REQUIRED)  # headers only: src/export/, src/capacity/
if(DELTASYNC_BUILD_PROGRAMS)
  find_package(CLI11 REQUIRED)
  pkg_check_modules(PROMETHEUS REQUIRED IMPORTED_TARGET prometheus-cpp-core>=1.0)

  # Asio and Beast are compiled once, in asio_impl.cpp, and only declared elsewhere.
  add_library(deltasync_asio ${DELTASYNC_LIBRARY_KIND} ${PROJECT_SOURCE_DIR}/src/net/asio_impl.cpp)
  target_compile_definitions(deltasync_asio PUBLIC BOOST_ASIO_SEPARATE_COMPILATION BOOST_BEAST_SEPARATE_COMPILATION
                                                   BOOST_ASIO_NO_DEPRECATED)
  target_link_libraries(deltasync_asio PUBLIC Boost::headers Threads::Threads OpenSSL::SSL OpenSSL::Crypto
                        PRIVATE deltasync_options)
endif()
if(DELTASYNC_BUILD_TESTS)
  find_package(GTest REQUIRED)
endif()
if(DELTASYNC_BUILD_BENCHMARKS)
  find_package(benchmark REQUIRED)
endif()
