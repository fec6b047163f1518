# What users link: deltasync::writer for a trainer, deltasync::receiver for a rollout server, deltasync::export for plans of a
# trainer's tensors, deltasync::control for an engine's control routes (where the programs are built, whose HTTP server it
# uses), all of one archive of the layers that they stand on. It is made of the layers' objects, so that nothing of how they
# are built reaches who links it.
# `cmake --install` brings it with its headers, the programs, a CMake package and a pkg-config file.
set(layers
    base
    format
    placement
    export
    delta
    gpu
    shm
    blocking
    auth
    tls
    ucx
    bucket
    writer
    targets
    receiver)
set(parts writer receiver export)
if(DELTASYNC_BUILD_PROGRAMS)
  list(
    APPEND
    layers
    asio
    net
    http
    control)
  list(APPEND parts control)
endif()
if(DELTASYNC_WITH_CUDA)
  list(APPEND layers gpu_kernels)
endif()
list(TRANSFORM layers REPLACE "(.+)" "$<TARGET_OBJECTS:deltasync_\\1>")

add_library(deltasync_archive STATIC ${layers})
add_library(deltasync_for_writer INTERFACE)
add_library(deltasync_for_receiver INTERFACE)
add_library(deltasync_for_export INTERFACE)
if(DELTASYNC_BUILD_PROGRAMS)
  add_library(deltasync_for_control INTERFACE)
endif()
set_target_properties(deltasync_archive PROPERTIES OUTPUT_NAME deltasync EXPORT_NAME deltasync LINKER_LANGUAGE CXX)
target_compile_features(deltasync_archive PUBLIC cxx_std_20)
target_include_directories(deltasync_archive PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>)
target_link_libraries(
  deltasync_archive
  PRIVATE PkgConfig::XXHASH
          PkgConfig::ZSTD
          OpenSSL::SSL
          OpenSSL::Crypto
          Threads::Threads
          ${CMAKE_DL_LIBS})
if(DELTASYNC_WITH_CUDA)  # who links what is installed needs no toolkit: a copy of its runtime is installed, too
  target_link_libraries(deltasync_archive PRIVATE $<BUILD_INTERFACE:CUDA::cudart_static>
                                                  $<INSTALL_INTERFACE:deltasync::cudart>)
endif()
foreach(part IN LISTS parts)
  set_target_properties(deltasync_for_${part} PROPERTIES EXPORT_NAME ${part})
  target_link_libraries(deltasync_for_${part} INTERFACE deltasync_archive)
  add_library(deltasync::${part} ALIAS deltasync_for_${part})
endforeach()

if(NOT DELTASYNC_INSTALL)
  return()
endif()
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)
target_include_directories(deltasync_archive PUBLIC $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/deltasync)

if(DELTASYNC_BUILD_PROGRAMS)
  install(TARGETS deltasync_for_control EXPORT deltasync)
endif()
install(
  TARGETS deltasync_archive deltasync_for_writer deltasync_for_receiver deltasync_for_export
  EXPORT deltasync
  ARCHIVE COMPONENT library)
install(
  DIRECTORY ${PROJECT_SOURCE_DIR}/include/deltasync
  TYPE INCLUDE
  COMPONENT library)
install(
  EXPORT deltasync
  NAMESPACE deltasync::
  FILE deltasyncTargets.cmake
  DESTINATION ${package_dir}
  COMPONENT library)
configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/deltasyncConfig.cmake.in
                              ${PROJECT_BINARY_DIR}/deltasyncConfig.cmake INSTALL_DESTINATION ${package_dir}
                              PATH_VARS CMAKE_INSTALL_LIBDIR)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/deltasyncConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(
  FILES ${PROJECT_BINARY_DIR}/deltasyncConfig.cmake ${PROJECT_BINARY_DIR}/deltasyncConfigVersion.cmake
  DESTINATION ${package_dir}
  COMPONENT library)

set(pc_libs "-lpthread ${CMAKE_DL_LIBS}")
list(TRANSFORM pc_libs REPLACE " (dl|rt)" " -l\\1")
if(DELTASYNC_WITH_CUDA)
  string(PREPEND pc_libs "-ldeltasync_cudart -lrt ")
  install(
    FILES $<TARGET_FILE:CUDA::cudart_static>
    DESTINATION ${CMAKE_INSTALL_LIBDIR}
    RENAME libdeltasync_cudart.a
    COMPONENT library)
endif()
# The file finds the prefix from where it lies, unless that is an absolute place outside of it.
if(IS_ABSOLUTE "${CMAKE_INSTALL_LIBDIR}")
  set(pc_prefix "${CMAKE_INSTALL_PREFIX}")
else()
  cmake_path(SET up "${CMAKE_INSTALL_LIBDIR}/pkgconfig")
  string(REGEX REPLACE "[^/]+" ".." up "${up}")
  set(pc_prefix "\${pcfiledir}/${up}")
endif()
foreach(place IN ITEMS LIBDIR INCLUDEDIR)
  set(pc_${place} "\${prefix}")
  cmake_path(APPEND pc_${place} "${CMAKE_INSTALL_${place}}")  # an absolute one replaces what is before it
endforeach()
configure_file(${CMAKE_CURRENT_LIST_DIR}/deltasync.pc.in ${PROJECT_BINARY_DIR}/deltasync.pc @ONLY)
install(
  FILES ${PROJECT_BINARY_DIR}/deltasync.pc
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig
  COMPONENT library)

if(DELTASYNC_BUILD_PROGRAMS)
  install(TARGETS deltasync-agent deltasync RUNTIME COMPONENT programs)
  if(TARGET deltasync-bench)  # a wheel has none
    install(TARGETS deltasync-bench RUNTIME COMPONENT programs OPTIONAL)
  endif()
  install(
    FILES "${PROJECT_SOURCE_DIR}/docs/operating/deltasync-agent@.service"
    DESTINATION lib/systemd/system
    COMPONENT programs)
  if(NOT CMAKE_CROSSCOMPILING AND NOT DELTASYNC_PORTABLE)
    install(
      FILES ${PROJECT_BINARY_DIR}/tools/cli/completion.bash
      DESTINATION share/bash-completion/completions
      RENAME deltasync
      COMPONENT programs)
    install(
      FILES ${PROJECT_BINARY_DIR}/tools/cli/completion.fish
      DESTINATION share/fish/vendor_completions.d
      RENAME deltasync.fish
      COMPONENT programs)
    # zsh looks below /usr/local, and elsewhere below prefixes, in site-functions; Debian's zsh below /usr in another place.
    foreach(place IN ITEMS site-functions vendor-completions)
      install(
        FILES ${PROJECT_BINARY_DIR}/tools/cli/completion.zsh
        DESTINATION share/zsh/${place}
        RENAME _deltasync
        COMPONENT programs)
    endforeach()
  endif()
endif()

# `cpack --config build/CPackConfig.cmake` makes two Debian packages: deltasync (the programs), libdeltasync-dev.
set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_CONTACT "the deltasync developers <deltasync@localhost>")
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_COMPONENTS_ALL library)
if(DELTASYNC_BUILD_PROGRAMS)
  list(APPEND CPACK_COMPONENTS_ALL programs)
endif()
set(CPACK_STRIP_FILES ON)
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SECTION misc)
set(CPACK_DEBIAN_PROGRAMS_PACKAGE_NAME deltasync)
set(CPACK_DEBIAN_PROGRAMS_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_LIBRARY_PACKAGE_NAME libdeltasync-dev)
set(CPACK_DEBIAN_LIBRARY_PACKAGE_SECTION libdevel)
set(CPACK_DEBIAN_LIBRARY_PACKAGE_DEPENDS "libxxhash-dev, libzstd-dev, libssl-dev, pkg-config")
include(CPack)
