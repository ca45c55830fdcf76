# Steps of the package tests: cmake -D MODE=... -D SETTINGS=file -P check.cmake
include("${SETTINGS}")  # what the main build used: see CMakeLists.txt beside this file
cmake_policy(VERSION 3.25)

# run(what command...): fails with the whole output.
function(run what)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "${what} failed (${status}):\n${output}")
  endif()
  message(STATUS "${what}: done")
  set(output "${output}" PARENT_SCOPE)
endfunction()

function(temporary_folder out)
  execute_process(COMMAND mktemp -d -t libddp-package-XXXXXX OUTPUT_VARIABLE dir OUTPUT_STRIP_TRAILING_WHITESPACE)
  set(${out} "${dir}" PARENT_SCOPE)
endfunction()

# build_and_run(build arguments...): configures the consumer, builds it, runs it and looks at what it is linked with.
function(build_and_run source build)
  run("configure" "${CMAKE_COMMAND}" -S "${source}" -B "${build}" -G "${GENERATOR}" -C "${INITIAL_CACHE}"
    -D CMAKE_BUILD_TYPE=Debug -D CMAKE_CXX_FLAGS_DEBUG=-O0 -D "Torch_DIR=${LIBTORCH_ROOT}" ${ARGN})
  run("build" "${CMAKE_COMMAND}" --build "${build}" --parallel ${JOBS})
  run("run" "${build}/app")
  if(NOT output MATCHES "libddp ${VERSION}: 2 in a world of 1")
    message(FATAL_ERROR "app printed: ${output}")
  endif()
  run("ldd" ldd "${build}/app")
  if(output MATCHES "libtorch_cuda" OR output MATCHES "not found")
    message(FATAL_ERROR "a CPU program is linked with CUDA, or a library is missing:\n${output}")
  endif()
  if(HAS_CUDA)
    run("run with CUDA linked" "${build}/cuda_app")
    run("ldd" ldd "${build}/cuda_app")
    if(NOT output MATCHES "libtorch_cuda" OR output MATCHES "not found")
      message(FATAL_ERROR "the linker dropped libtorch_cuda, or a library is missing:\n${output}")
    endif()
  endif()
endfunction()

if(MODE STREQUAL "find_package")
  temporary_folder(work)
  file(COPY "${CONSUMER}/" DESTINATION "${work}/consumer")
  run("install" "${CMAKE_COMMAND}" --install "${BUILD}" --prefix "${work}/prefix")
  build_and_run("${work}/consumer" "${work}/build" -D HOW=find_package -D "CMAKE_PREFIX_PATH=${work}/prefix")

  # The installed package refuses what does not fit.
  execute_process(COMMAND "${CMAKE_COMMAND}" -S "${work}/consumer" -B "${work}/build17" -G "${GENERATOR}" -D CMAKE_CXX_STANDARD=17
    -D "CMAKE_PREFIX_PATH=${work}/prefix" RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(status EQUAL 0 OR NOT output MATCHES "needs C\\+\\+20")
    message(FATAL_ERROR "C++17 was not refused by the package: ${output}")
  endif()
  # The libtorch of the build is remembered: it is found without being named.
  run("configure without Torch_DIR" "${CMAKE_COMMAND}" -E env HOME=/nonexistent LIBDDP_CACHE=/nonexistent
    "${CMAKE_COMMAND}" -S "${work}/consumer" -B "${work}/build_hint" -G "${GENERATOR}"
    -D "CMAKE_PREFIX_PATH=${work}/prefix" -D LIBDDP_PYTHON=/bin/false)
  # The examples stand alone.
  if(EXAMPLES)
    run("configure the examples" "${CMAKE_COMMAND}" -S "${SOURCE}/examples" -B "${work}/examples" -G "${GENERATOR}" -C "${INITIAL_CACHE}"
      -D CMAKE_BUILD_TYPE=Debug -D CMAKE_CXX_FLAGS_DEBUG=-O0 -D "CMAKE_PREFIX_PATH=${work}/prefix")
    run("build one of them" "${CMAKE_COMMAND}" --build "${work}/examples" --target mini_train)
    run("run it" "${work}/examples/mini_train" --steps 1 --dim 8)
  endif()
  file(REMOVE_RECURSE "${work}")

elseif(MODE MATCHES "^(add_subdirectory|FetchContent)$")
  # One folder for both: the second finds libddp compiled. Static, which the main build is not.
  build_and_run("${CONSUMER}" "${BUILD}/package" -D HOW=${MODE} -D "LIBDDP_SOURCE=${SOURCE}" -D BUILD_SHARED_LIBS=OFF)

elseif(MODE STREQUAL "refusals")
  temporary_folder(work)
  # refused(what pattern arguments...): configuring ends with one message, and it is libddp's.
  function(refused what pattern)
    file(REMOVE_RECURSE "${work}/build")
    execute_process(
      COMMAND "${CMAKE_COMMAND}" -E env --unset=Torch_DIR --unset=CMAKE_PREFIX_PATH HOME=/nonexistent LIBDDP_CACHE=/nonexistent
        "${CMAKE_COMMAND}" -S "${SOURCE}" -B "${work}/build" -G "${GENERATOR}" -C "${INITIAL_CACHE}"
        -D LIBDDP_BUILD_TESTS=OFF -D LIBDDP_BUILD_EXAMPLES=OFF -D LIBDDP_BUILD_BENCHMARKS=OFF ${ARGN}
      RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
    string(REGEX REPLACE "[ \n]+" " " text "${output}")  # CMake breaks the sentence into lines
    string(REGEX MATCHALL "CMake Error" errors "${text}")
    list(LENGTH errors count)
    if(status EQUAL 0 OR NOT count EQUAL 1 OR NOT text MATCHES "libddp: .*${pattern}")
      message(SEND_ERROR "${what}: expected one sentence with '${pattern}', found:\n${output}")
    else()
      message(STATUS "${what}: refused")
    endif()
  endfunction()
  set(torch -D "Torch_DIR=${LIBTORCH_ROOT}")

  refused("Gloo's headers missing" "gloo/algorithm.h is not in LIBDDP_GLOO_INCLUDE .*leave it empty" ${torch} -D LIBDDP_GLOO_INCLUDE=/nonexistent)
  refused("C++17 by CMAKE_CXX_STANDARD" "needs C\\+\\+20" ${torch} -D CMAKE_CXX_STANDARD=17)
  refused("C++17 by a flag" "needs C\\+\\+20" ${torch} -D CMAKE_CXX_FLAGS=-std=c++17)
  refused("Torch_DIR leads nowhere" "Torch_DIR is /nonexistent, and no libtorch is there" -D Torch_DIR=/nonexistent)
  refused("no libtorch anywhere" "no libtorch >= 2[.]11 was found.*quickstart" -D LIBDDP_PYTHON=/bin/false)
  refused("the old string ABI" "C\\+\\+11 string ABI" ${torch} -D CMAKE_CXX_FLAGS=-D_GLIBCXX_USE_CXX11_ABI=0)
  refused("LIBDDP_CUDA with a typing error" "LIBDDP_CUDA is YES PLEASE" ${torch} "-DLIBDDP_CUDA=YES PLEASE")

  # Folders that look like a libtorch as far as the find module looks.
  file(MAKE_DIRECTORY "${work}/old/lib" "${work}/old/include/ATen" "${work}/old/share/cmake/Caffe2" "${work}/old/share/cmake/Torch")
  file(TOUCH "${work}/old/lib/libtorch_cpu.so" "${work}/old/include/ATen/ATen.h")
  file(WRITE "${work}/old/lib/libc10.so" "_ZNSt7__cxx1112basic_string\n")
  file(WRITE "${work}/old/build-version" "2.10.0+cpu\n")
  refused("an old libtorch" "is 2[.]10[.]0 and 2[.]11" -D "CMAKE_PREFIX_PATH=${work}/old")
  file(WRITE "${work}/old/build-version" "2.12.0+cpu\n")
  refused("LIBDDP_CUDA=ON without CUDA" "LIBDDP_CUDA is ON, but .* without CUDA" -D "Torch_DIR=${work}/old/share/cmake/Torch" -D LIBDDP_CUDA=ON)
  file(WRITE "${work}/old/share/cmake/Caffe2/Caffe2Targets.cmake" "  INTERFACE_COMPILE_DEFINITIONS \"USE_DISTRIBUTED\"\n")
  refused("libtorch without Gloo" "without Gloo" -D "Torch_DIR=${work}/old/share/cmake/Torch")
  file(WRITE "${work}/old/lib/libc10.so" "_ZNSs\n")
  refused("libtorch of the old string ABI" "C\\+\\+11 string ABI" -D "CMAKE_PREFIX_PATH=${work}/old")
  file(REMOVE_RECURSE "${work}")
else()
  message(FATAL_ERROR "MODE is '${MODE}'")
endif()
