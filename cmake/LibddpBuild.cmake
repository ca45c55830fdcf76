# How libddp's own targets are compiled; nothing of it reaches users. Offers
#   libddp_configure(target [library])        warnings, flags and a precompiled header
#   libddp_skip_pch_where_plain(source...)

# Everything of a build lies together, so that libddp finds libddp_cuda beside itself and users find the programs.
if(PROJECT_IS_TOP_LEVEL)
  set(CMAKE_RUNTIME_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/bin")
  set(CMAKE_LIBRARY_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/lib")
  set(CMAKE_ARCHIVE_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/lib")
  set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
  if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
    set(CMAKE_BUILD_TYPE Release CACHE STRING "Build type" FORCE)
  endif()

  # A compiler that reads all of torch takes over a gigabyte: as many at once as fit.
  cmake_host_system_information(RESULT _cores QUERY NUMBER_OF_LOGICAL_CORES)
  cmake_host_system_information(RESULT _megabytes QUERY TOTAL_PHYSICAL_MEMORY)
  math(EXPR _jobs "${_megabytes} / 1500")
  if(_jobs GREATER _cores)
    set(_jobs ${_cores})
  elseif(_jobs LESS 1)
    set(_jobs 1)
  endif()
  set(LIBDDP_JOBS ${_jobs} CACHE STRING "Compile jobs that run at once (Ninja)")
  set_property(GLOBAL PROPERTY JOB_POOLS libddp_compile=${LIBDDP_JOBS})
  set(CMAKE_JOB_POOL_COMPILE libddp_compile)
  set(CMAKE_JOB_POOL_PRECOMPILE_HEADER libddp_compile)

  find_program(LIBDDP_CCACHE ccache)
  if(LIBDDP_CCACHE AND NOT DEFINED CMAKE_CXX_COMPILER_LAUNCHER)
    # The sloppiness is what ccache asks for with precompiled headers.
    set(CMAKE_CXX_COMPILER_LAUNCHER "${CMAKE_COMMAND}" -E env
        "CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime" "${LIBDDP_CCACHE}")
  endif()

  include(CheckLinkerFlag)
  check_linker_flag(CXX -fuse-ld=mold LIBDDP_HAS_MOLD)
  if(LIBDDP_HAS_MOLD)
    add_link_options(-fuse-ld=mold)
  endif()
endif()

# LIBDDP_SANITIZE is set by the presets asan and tsan.
set(LIBDDP_SANITIZE "" CACHE STRING "Sanitizers for libddp's own targets, e.g. address,undefined or thread")

add_library(libddp_flags INTERFACE)
# -fPIC for programs too: they share one precompiled header with the library, and its flags must be the same.
target_compile_options(libddp_flags INTERFACE -fPIC -Wall -Wextra)
target_compile_features(libddp_flags INTERFACE cxx_std_20)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND LIBDDP_PCH)
  target_compile_options(libddp_flags INTERFACE -fpch-preprocess -Winvalid-pch)  # the first is for ccache
endif()
if(LIBDDP_SANITIZE)
  target_compile_options(libddp_flags INTERFACE -fsanitize=${LIBDDP_SANITIZE} -fno-omit-frame-pointer)
  target_link_options(libddp_flags INTERFACE -fsanitize=${LIBDDP_SANITIZE})
endif()

# Precompiled headers: reading libtorch's is most of the compile time of a file. Two, because what the larger one
# brings with it costs every file eight seconds more than the smaller.
if(LIBDDP_PCH)
  file(WRITE "${PROJECT_BINARY_DIR}/pch/empty.cpp.new" "// Only here to carry a precompiled header.\n")
  file(COPY_FILE "${PROJECT_BINARY_DIR}/pch/empty.cpp.new" "${PROJECT_BINARY_DIR}/pch/empty.cpp" ONLY_IF_DIFFERENT)
  set(_std <algorithm> <atomic> <chrono> <condition_variable> <cstdint> <filesystem> <functional> <map> <memory> <mutex>
    <optional> <span> <string> <string_view> <thread> <tuple> <utility> <vector>)
  foreach(_pch IN ITEMS library programs)
    add_library(ddp_pch_${_pch} OBJECT EXCLUDE_FROM_ALL "${PROJECT_BINARY_DIR}/pch/empty.cpp")
    set_target_properties(ddp_pch_${_pch} PROPERTIES CXX_EXTENSIONS OFF)
    target_link_libraries(ddp_pch_${_pch} PRIVATE libddp_flags libtorch::torch_cpu)
  endforeach()
  target_precompile_headers(ddp_pch_library PRIVATE <torch/nn/module.h> <torch/optim/adamw.h> <torch/optim/sgd.h>
    <torch/csrc/distributed/c10d/ProcessGroup.hpp> ${_std})
  target_precompile_headers(ddp_pch_programs PRIVATE <torch/torch.h> ${_std})
endif()

# libddp_configure(target [library]): "library" for sources that do without <torch/torch.h>.
function(libddp_configure target)
  target_link_libraries(${target} PRIVATE $<BUILD_INTERFACE:libddp_flags>)
  set_target_properties(${target} PROPERTIES CXX_EXTENSIONS OFF DEFINE_SYMBOL "")
  if(LIBDDP_PCH)
    set(_pch programs ${ARGN})
    list(GET _pch -1 _pch)
    target_precompile_headers(${target} REUSE_FROM ddp_pch_${_pch})
  endif()
endfunction()

# _libddp_reads_torch(file out): whether it includes libtorch's large headers, itself or through libddp's own.
function(_libddp_reads_torch file out)
  file(STRINGS "${file}" _lines REGEX "^ *#include ")
  if(_lines MATCHES "<(torch|ATen|caffe2)/")
    set(${out} TRUE PARENT_SCOPE)
    return()
  endif()
  get_filename_component(_here "${file}" DIRECTORY)
  foreach(_line IN LISTS _lines)
    if(_line MATCHES "\"([^\"]+)\"")
      foreach(_dir IN ITEMS "${_here}" "${CMAKE_CURRENT_SOURCE_DIR}" "${PROJECT_SOURCE_DIR}/libddp/src" "${PROJECT_SOURCE_DIR}/libddp/include")
        if(EXISTS "${_dir}/${CMAKE_MATCH_1}")
          _libddp_reads_torch("${_dir}/${CMAKE_MATCH_1}" _reads)
          if(_reads)
            set(${out} TRUE PARENT_SCOPE)
            return()
          endif()
          break()
        endif()
      endforeach()
    endif()
  endforeach()
  set(${out} FALSE PARENT_SCOPE)
endfunction()

# Sources that read little compile faster without a precompiled header.
function(libddp_skip_pch_where_plain)
  foreach(_source IN LISTS ARGN)
    _libddp_reads_torch("${_source}" _reads)
    if(NOT _reads)
      set_source_files_properties("${_source}" PROPERTIES SKIP_PRECOMPILE_HEADERS ON)
    endif()
  endforeach()
endfunction()
