# Finds libtorch without Caffe2's own CMake package, which demands a CUDA toolkit wherever libtorch has CUDA.
#
# Looked for, in this order: Torch_DIR (or TORCH_ROOT), CMAKE_PREFIX_PATH, the folder that an installed libddp was built
# with, the Python package torch of LIBDDP_PYTHON (default: python3), the environments that cmake/quickstart.sh made.
# A folder that was named and is no libtorch, or is too old, is an error; the others are passed over.
#
# Defines the targets libtorch::torch_cpu, libtorch::c10 and, where libtorch has CUDA, libtorch::torch_cuda,
# libtorch::c10_cuda, libtorch::cuda_headers; and the variables
#   Libtorch_ROOT      the folder with include/ and lib/
#   Libtorch_VERSION   e.g. 2.15.0
#   Libtorch_HAS_CUDA  libtorch_cuda.so is there, built with NCCL
#   Libtorch_CUDA_HEADERS  where the CUDA and NCCL headers are, empty when there are none
#   Libtorch_PYTHON    the Python that imports this libtorch, empty for an unpacked archive

if(NOT DEFINED Libtorch_FIND_VERSION OR Libtorch_FIND_VERSION STREQUAL "")
  set(Libtorch_FIND_VERSION 2.11)
endif()

# --- helpers ------------------------------------------------------------------------------------------------------

# The libtorch at or around `dir`: an unpacked archive, a wheel's torch folder, share/cmake(/Torch), site-packages.
function(_libtorch_root_of dir out)
  foreach(way IN ITEMS "" /torch /.. /../.. /../../.. /libtorch)
    if(EXISTS "${dir}${way}/lib/libtorch_cpu.so" AND EXISTS "${dir}${way}/include/ATen/ATen.h")
      file(REAL_PATH "${dir}${way}" root)
      set(${out} "${root}" PARENT_SCOPE)
      return()
    endif()
  endforeach()
  set(${out} "" PARENT_SCOPE)
endfunction()

function(_libtorch_version_of root out)
  foreach(header IN ITEMS torch/headeronly/version.h torch/csrc/api/include/torch/version.h torch/version.h)
    if(EXISTS "${root}/include/${header}")
      file(STRINGS "${root}/include/${header}" lines REGEX "^#define TORCH_VERSION_(MAJOR|MINOR|PATCH) +[0-9]+")
      if(lines)
        string(REGEX MATCHALL "[0-9]+" numbers "${lines}")
        list(JOIN numbers "." version)
        set(${out} "${version}" PARENT_SCOPE)
        return()
      endif()
    endif()
  endforeach()
  set(version "")
  if(EXISTS "${root}/build-version")
    file(STRINGS "${root}/build-version" version LIMIT_COUNT 1)
    string(REGEX MATCH "^[0-9.]+" version "${version}")
  endif()
  set(${out} "${version}" PARENT_SCOPE)
endfunction()

# The folder of the Python package torch; not imported (that takes seconds), only located.
function(_libtorch_root_of_python python out)
  execute_process(
    COMMAND "${python}" -c "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')"
    OUTPUT_VARIABLE dir OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE failed)
  set(root "")
  if(NOT failed AND dir)
    _libtorch_root_of("${dir}" root)
  endif()
  set(${out} "${root}" PARENT_SCOPE)
endfunction()

# --- where it is --------------------------------------------------------------------------------------------------

set(Libtorch_ROOT "")
set(_libtorch_reason "")  # why there is none, one sentence

foreach(_source IN ITEMS "${Torch_DIR}" "$ENV{Torch_DIR}" "${TORCH_ROOT}" "$ENV{TORCH_ROOT}")
  if(_source AND NOT _source MATCHES "-NOTFOUND$" AND NOT Libtorch_ROOT AND NOT _libtorch_reason)
    _libtorch_root_of("${_source}" Libtorch_ROOT)
    if(NOT Libtorch_ROOT)
      set(_libtorch_reason "Torch_DIR is ${_source}, and no libtorch is there (lib/libtorch_cpu.so, include/ATen): point it at an unpacked libtorch or at a wheel's torch folder, or unset it")
    endif()
  endif()
endforeach()

if(NOT Libtorch_ROOT AND NOT _libtorch_reason)
  string(REPLACE ":" ";" _prefixes "$ENV{CMAKE_PREFIX_PATH}")
  foreach(_prefix IN LISTS CMAKE_PREFIX_PATH _prefixes)
    if(NOT Libtorch_ROOT)
      _libtorch_root_of("${_prefix}" Libtorch_ROOT)
    endif()
  endforeach()
endif()

set(_libtorch_named FALSE)
if(Libtorch_ROOT)
  set(_libtorch_named TRUE)
  # Ninja may run CMake again from a shell without these variables: remember what they named.
  if(NOT Torch_DIR AND NOT "$ENV{Torch_DIR}$ENV{TORCH_ROOT}$ENV{CMAKE_PREFIX_PATH}" STREQUAL "")
    set(Torch_DIR "${Libtorch_ROOT}" CACHE PATH "The libtorch that the environment named")
  endif()
elseif(NOT _libtorch_reason)
  # Places nobody named: the first that is new enough.
  set(_candidates "")
  if(LIBDDP_LIBTORCH_HINT)
    _libtorch_root_of("${LIBDDP_LIBTORCH_HINT}" _root)
    list(APPEND _candidates "${_root}")
  endif()
  if(NOT LIBDDP_PYTHON)
    find_program(LIBDDP_PYTHON NAMES python3 python DOC "Python whose torch package is used when no libtorch is named")
  endif()
  if(LIBDDP_PYTHON)
    _libtorch_root_of_python("${LIBDDP_PYTHON}" _root)
    list(APPEND _candidates "${_root}")
  endif()
  if(DEFINED ENV{LIBDDP_CACHE})
    set(_cache "$ENV{LIBDDP_CACHE}")
  else()
    set(_cache "$ENV{HOME}/.cache/libddp")
  endif()
  file(GLOB _marks "${_cache}/venv-torch-*/.complete")
  list(SORT _marks COMPARE NATURAL ORDER DESCENDING)
  foreach(_mark IN LISTS _marks)
    get_filename_component(_venv "${_mark}" DIRECTORY)
    file(GLOB _packages "${_venv}/lib/python3*/site-packages/torch")
    foreach(_package IN LISTS _packages)
      _libtorch_root_of("${_package}" _root)
      list(APPEND _candidates "${_root}")
    endforeach()
  endforeach()

  set(_too_old "")
  foreach(_candidate IN LISTS _candidates)
    if(_candidate AND NOT Libtorch_ROOT)
      _libtorch_version_of("${_candidate}" _version)
      if(_version VERSION_LESS Libtorch_FIND_VERSION)
        set(_too_old " (${_candidate} is libtorch ${_version})")
      else()
        set(Libtorch_ROOT "${_candidate}")
      endif()
    endif()
  endforeach()
  if(NOT Libtorch_ROOT)
    set(_libtorch_reason "no libtorch >= ${Libtorch_FIND_VERSION} was found${_too_old}: run 'bash cmake/quickstart.sh build', which fetches one, or set CMAKE_PREFIX_PATH to an unpacked libtorch or LIBDDP_PYTHON to a Python that has torch")
  endif()
endif()

# --- what it is ---------------------------------------------------------------------------------------------------

if(Libtorch_ROOT)
  _libtorch_version_of("${Libtorch_ROOT}" Libtorch_VERSION)
  file(STRINGS "${Libtorch_ROOT}/lib/libc10.so" _new_abi REGEX "NSt7__cxx1112basic_string" LIMIT_COUNT 1)
  set(_definitions "")
  if(EXISTS "${Libtorch_ROOT}/share/cmake/Caffe2/Caffe2Targets.cmake")
    file(STRINGS "${Libtorch_ROOT}/share/cmake/Caffe2/Caffe2Targets.cmake" _definitions REGEX "INTERFACE_COMPILE_DEFINITIONS \"[A-Z]")
  endif()
  if(_libtorch_named AND Libtorch_VERSION VERSION_LESS Libtorch_FIND_VERSION)
    set(_libtorch_reason "the libtorch in ${Libtorch_ROOT} is ${Libtorch_VERSION} and ${Libtorch_FIND_VERSION} is the oldest that is supported: install a newer one or unset Torch_DIR and CMAKE_PREFIX_PATH")
  elseif(NOT _new_abi OR CMAKE_CXX_FLAGS MATCHES "_GLIBCXX_USE_CXX11_ABI=0")
    set(_libtorch_reason "the libtorch in ${Libtorch_ROOT} and the compiler flags must both use the C++11 string ABI: take the 'cxx11 ABI' archive and drop _GLIBCXX_USE_CXX11_ABI=0")
  elseif(_definitions AND NOT _definitions MATCHES "USE_C10D_GLOO")
    set(_libtorch_reason "the libtorch in ${Libtorch_ROOT} was built without Gloo (USE_C10D_GLOO): take one from pip or pytorch.org")
  endif()
endif()

if(NOT _libtorch_reason)
  set(Libtorch_HAS_CUDA FALSE)
  if(EXISTS "${Libtorch_ROOT}/lib/libtorch_cuda.so" AND (NOT _definitions OR _definitions MATCHES "USE_C10D_NCCL"))
    set(Libtorch_HAS_CUDA TRUE)
  endif()
  set(Libtorch_PYTHON "")
  if(Libtorch_ROOT MATCHES "^(.+)/lib(64)?/(python3\\.[0-9]+)/(site|dist)-packages/torch$")
    foreach(_name IN ITEMS "${CMAKE_MATCH_3}" python3)
      if(EXISTS "${CMAKE_MATCH_1}/bin/${_name}" AND NOT Libtorch_PYTHON)
        set(Libtorch_PYTHON "${CMAKE_MATCH_1}/bin/${_name}")
      endif()
    endforeach()
    if(NOT Libtorch_PYTHON AND LIBDDP_PYTHON)  # a user's own site-packages
      _libtorch_root_of_python("${LIBDDP_PYTHON}" _root)
      if(_root STREQUAL Libtorch_ROOT)
        set(Libtorch_PYTHON "${LIBDDP_PYTHON}")
      endif()
    endif()
  endif()

  cmake_path(GET Libtorch_ROOT PARENT_PATH _site_packages)
  # libtorch of the wheels needs the libraries of its sister packages (nvidia/*/lib), which must come before a toolkit's.
  file(GLOB _sisters LIST_DIRECTORIES TRUE "${_site_packages}/nvidia/*/lib")
  set(_rpath "")
  foreach(_dir IN LISTS _sisters)
    list(APPEND _rpath "LINKER:-rpath,${_dir}" "LINKER:-rpath-link,${_dir}")
  endforeach()

  function(_libtorch_import name)
    if(NOT TARGET libtorch::${name})
      add_library(libtorch::${name} SHARED IMPORTED)
      set_target_properties(libtorch::${name} PROPERTIES
        IMPORTED_LOCATION "${Libtorch_ROOT}/lib/lib${name}.so"
        INTERFACE_INCLUDE_DIRECTORIES "${Libtorch_ROOT}/include;${Libtorch_ROOT}/include/torch/csrc/api/include"
        INTERFACE_SYSTEM_INCLUDE_DIRECTORIES "${Libtorch_ROOT}/include;${Libtorch_ROOT}/include/torch/csrc/api/include"
        INTERFACE_LINK_OPTIONS "${_rpath}"
        INTERFACE_COMPILE_FEATURES cxx_std_20)
    endif()
  endfunction()
  _libtorch_import(c10)
  _libtorch_import(torch_cpu)
  set_target_properties(libtorch::torch_cpu PROPERTIES
    INTERFACE_COMPILE_DEFINITIONS "USE_DISTRIBUTED;USE_C10D_GLOO"  # without them the c10d headers compile to nothing
    INTERFACE_LINK_LIBRARIES libtorch::c10)

  set(Libtorch_CUDA_HEADERS "")
  if(Libtorch_HAS_CUDA)
    _libtorch_import(c10_cuda)
    _libtorch_import(torch_cuda)
    # The wheels' own headers first, which are of libtorch's age, then a toolkit's.
    foreach(_header IN ITEMS cuda_runtime_api.h nccl.h)
      file(GLOB _found "${_site_packages}/nvidia/*/include/${_header}")
      if(_found)
        file(GLOB _found LIST_DIRECTORIES TRUE "${_site_packages}/nvidia/*/include")  # for CUDA 12 one a library
      else()
        find_path(_found ${_header} NO_CACHE PATH_SUFFIXES include
          HINTS "${CUDAToolkit_ROOT}" "$ENV{CUDA_HOME}" "$ENV{CUDA_PATH}" /usr/local/cuda)
      endif()
      list(APPEND Libtorch_CUDA_HEADERS ${_found})
    endforeach()
    list(REMOVE_DUPLICATES Libtorch_CUDA_HEADERS)
    if(Libtorch_CUDA_HEADERS MATCHES "-NOTFOUND")
      set(Libtorch_CUDA_HEADERS "")
    endif()

    if(NOT TARGET libtorch::cuda_headers)
      add_library(libtorch::cuda_headers INTERFACE IMPORTED)
      set_target_properties(libtorch::cuda_headers PROPERTIES
        INTERFACE_INCLUDE_DIRECTORIES "${Libtorch_CUDA_HEADERS}"
        INTERFACE_SYSTEM_INCLUDE_DIRECTORIES "${Libtorch_CUDA_HEADERS}")
      # Inline functions of c10 and ATen call the CUDA runtime, so who includes them links it.
      file(GLOB _cudart "${_site_packages}/nvidia/*/lib/libcudart.so*" "${Libtorch_ROOT}/lib/libcudart*.so*"
           "/usr/local/cuda/lib64/libcudart.so")
      if(_cudart)
        list(GET _cudart 0 _cudart)
        file(REAL_PATH "${_cudart}" _cudart)
        add_library(libtorch::cudart SHARED IMPORTED)
        set_target_properties(libtorch::cudart PROPERTIES IMPORTED_LOCATION "${_cudart}")
        set_property(TARGET libtorch::cuda_headers PROPERTY INTERFACE_LINK_LIBRARIES libtorch::cudart)
      endif()
    endif()
    set_target_properties(libtorch::c10_cuda PROPERTIES INTERFACE_LINK_LIBRARIES "libtorch::c10;libtorch::cuda_headers")
    set_target_properties(libtorch::torch_cuda PROPERTIES
      INTERFACE_COMPILE_DEFINITIONS USE_C10D_NCCL
      INTERFACE_LINK_LIBRARIES "libtorch::torch_cpu;libtorch::c10_cuda")
  endif()
endif()

if(_libtorch_reason)
  set(Libtorch_FOUND FALSE)
  set(Libtorch_NOT_FOUND_MESSAGE "${_libtorch_reason}.")
  if(Libtorch_FIND_REQUIRED)
    message(FATAL_ERROR "libddp: ${_libtorch_reason}.")
  endif()
else()
  set(Libtorch_FOUND TRUE)
endif()
