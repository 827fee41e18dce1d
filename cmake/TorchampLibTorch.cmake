# SPDX-License-Identifier: BSD-3-Clause
#
# torchamp_find_libtorch(ERROR [FETCH]): creates the target torchamp::libtorch from the first of
#
#   1. the LibTorch that the user names: Torch_DIR, Torch_ROOT or CMAKE_PREFIX_PATH, as a variable.
#      Torch_ROOT and CMAKE_PREFIX_PATH may also be in the environment;
#   2. the torch of the Python that CMake finds, or of Python3_EXECUTABLE or an active venv;
#   3. with FETCH, PyPI's wheel, by pip, in a per-user cache: ~/.cache/torchamp/libtorch-VERSION.
#
# On failure the variable ERROR holds a text with the remedy; on success it is empty.
#
#   TORCHAMP_LIBTORCH_VERSION  the version to fetch; a Python's torch must have this version
#   TORCHAMP_CUDA              AUTO (ON if there is a device and LibTorch has a CUDA part), ON, OFF
#   XDG_CACHE_HOME             (environment) the folder of the cache, instead of ~/.cache
#
# Note [LibTorch by path]
#   LibTorch's own package (find_package(Torch)) enables the CUDA language if it finds a toolkit.
#   It always links torch_cuda, and it searches the toolkit's library folder before the wheel's
#   folder. With the toolkit 13.0, programs linked neither with 2.11 nor with 2.15 (an older NCCL,
#   no cuSPARSELt or NVSHMEM). This file therefore names the libraries by their paths: torch_cpu
#   and c10, and for a CUDA build torch_cuda and c10_cuda. The dynamic sections of these libraries
#   name the other libraries that they need.

set(TORCHAMP_LIBTORCH_PINNED 2.15.0)  # what is fetched
set(TORCHAMP_LIBTORCH_MINIMUM 2.6.0)  # what is accepted

function(torchamp_find_libtorch error)
  cmake_parse_arguments(PARSE_ARGV 1 arg "FETCH" "" "")
  set(${error} "" PARENT_SCOPE)
  if(TARGET torchamp::libtorch)
    return()
  endif()
  _torchamp_cuda_device(device)
  _torchamp_check_cxx_library(failure)

  if(NOT failure)
    _torchamp_pointed_at(prefix origin failure)
  endif()
  if(NOT prefix AND NOT failure AND CMAKE_CROSSCOMPILING)
    set(failure "This build is for ${CMAKE_SYSTEM_NAME} on ${CMAKE_SYSTEM_PROCESSOR}, so that LibTorch is neither taken \
from this machine's Python nor fetched. Point at one for that system with -DCMAKE_PREFIX_PATH=DIR, such as the folder \
torch in what this leaves: pip install --target DIR --platform PLATFORM --only-binary=:all: --no-deps torch")
  endif()
  if(NOT prefix AND NOT failure)
    _torchamp_python()
    _torchamp_of_python(prefix origin)
  endif()
  if(NOT prefix AND NOT failure AND arg_FETCH)
    _torchamp_fetch_libtorch(prefix failure "${device}")
    set(origin "a wheel of PyPI, in the cache")
  endif()
  if(NOT prefix AND NOT failure)
    set(failure "No LibTorch found. ${_torchamp_remedy}")
  endif()
  if(NOT failure)
    _torchamp_import(failure ${prefix} "${origin}" "${device}")
  endif()
  set(${error} "${failure}" PARENT_SCOPE)
endfunction()

set(_torchamp_remedy
    "Point at one with -DCMAKE_PREFIX_PATH=DIR (an unpacked LibTorch zip or a Python's \
site-packages/torch), or name a Python that has torch with -DPython3_EXECUTABLE=PATH.")

# torchamp_tests_find_libtorch(TEST…): lets tests find LibTorch's DLLs on Windows, where programs have no run path.
function(torchamp_tests_find_libtorch)
  if(WIN32)
    get_target_property(prefix torchamp::libtorch TORCHAMP_PREFIX)
    set_tests_properties(${ARGN} PROPERTIES ENVIRONMENT_MODIFICATION PATH=path_list_prepend:${prefix}/lib)
  endif()
endfunction()

# ---- 0. The compiler --------------------------------------------------------------------------------

# Note [Two copies of libstdc++]
#   If a program is linked with -static-libstdc++, or by a toolchain without a shared libstdc++, it exports the functions
#   of its copy to LibTorch. LibTorch has the shared copy. One copy then destroys objects that the other copy has created,
#   and the program aborts with "free(): invalid pointer", often before main(). This depends on the functions that the
#   program uses. With -Wl,--exclude-libs,libstdc++.a, a program does not export these functions.
function(_torchamp_check_cxx_library failure)
  set(${failure} "" PARENT_SCOPE)
  if(NOT CMAKE_READELF OR NOT UNIX OR APPLE)
    return()
  endif()
  set(linked_by "${CMAKE_CXX_COMPILER} ${CMAKE_CXX_FLAGS} ${CMAKE_EXE_LINKER_FLAGS}")
  if(NOT _torchamp_linked_by STREQUAL linked_by)
    set(CMAKE_TRY_COMPILE_TARGET_TYPE EXECUTABLE)
    set(program ${CMAKE_BINARY_DIR}/CMakeFiles/torchamp_cxx_library)
    try_compile(
      links
      SOURCE_FROM_CONTENT main.cpp "#include <iostream>\nint main() { std::cout << 1; }\n"
      COPY_FILE ${program} COPY_FILE_ERROR copied)
    set(needed "unknown")
    if(links)
      _torchamp_dynamic_section(needed folders ${program})
      file(REMOVE ${program})
    endif()
    set(_torchamp_linked_by ${linked_by} CACHE INTERNAL "What _torchamp_cxx_libraries are of")
    set(_torchamp_cxx_libraries "${needed}" CACHE INTERNAL "The libraries that an empty program needs")
  endif()
  if(NOT _torchamp_cxx_libraries MATCHES "libstdc[+][+]|libc[+][+]|unknown")
    set(${failure} "${CMAKE_CXX_COMPILER} links libstdc++ statically, but LibTorch has the shared one, and programs with \
two copies may abort (\"free(): invalid pointer\"). Take another compiler with -DCMAKE_CXX_COMPILER=PATH, remove \
-static-libstdc++ and -static from CMAKE_CXX_FLAGS and CMAKE_EXE_LINKER_FLAGS, or install the shared library for this \
compiler." PARENT_SCOPE)
  endif()
endfunction()

# ---- 1. The LibTorch that the user names ---------------------------------------------------------

# The version of the LibTorch under `prefix`; empty if there is none.
function(_torchamp_version version prefix)
  set(${version} "" PARENT_SCOPE)
  foreach(header IN ITEMS headeronly/version.h csrc/api/include/torch/version.h)
    if(EXISTS ${prefix}/include/torch/${header})
      file(STRINGS ${prefix}/include/torch/${header} lines
           REGEX "define TORCH_VERSION_(MAJOR|MINOR|PATCH) [0-9]+")
      if(lines)
        string(REGEX REPLACE "[^0-9;]" "" lines "${lines}")
        list(JOIN lines "." lines)
        set(${version} ${lines} PARENT_SCOPE)
        return()
      endif()
    endif()
  endforeach()
endfunction()

function(_torchamp_pointed_at prefix origin failure)
  # Torch_DIR names the folder of TorchConfig.cmake. An earlier find_package(Torch) also sets it.
  set(pointers "")
  if(Torch_DIR)
    list(APPEND pointers "Torch_DIR=${Torch_DIR}/../../..")
  endif()
  foreach(name IN ITEMS Torch_ROOT TORCH_ROOT)
    foreach(value IN LISTS ${name})
      list(APPEND pointers "${name}=${value}")
    endforeach()
    if(DEFINED ENV{${name}})
      list(APPEND pointers "${name}=$ENV{${name}}")
    endif()
  endforeach()
  file(TO_CMAKE_PATH "$ENV{CMAKE_PREFIX_PATH}" environment)
  foreach(value IN LISTS CMAKE_PREFIX_PATH environment)
    list(APPEND pointers "CMAKE_PREFIX_PATH=${value}")
  endforeach()

  foreach(pointer IN LISTS pointers)
    string(REGEX MATCH "^([^=]+)=(.*)$" pointer "${pointer}")
    set(name ${CMAKE_MATCH_1})
    set(given ${CMAKE_MATCH_2})
    # The prefix itself, the folder in which LibTorch was unpacked, or
    # torch.utils.cmake_prefix_path.
    foreach(below IN ITEMS . libtorch torch ../..)
      cmake_path(ABSOLUTE_PATH given BASE_DIRECTORY ${CMAKE_SOURCE_DIR} NORMALIZE OUTPUT_VARIABLE dir)
      cmake_path(APPEND dir ${below})
      cmake_path(NORMAL_PATH dir)
      string(REGEX REPLACE "/$" "" dir "${dir}")
      _torchamp_version(version "${dir}")
      if(NOT version)
        continue()
      endif()
      if(version VERSION_LESS TORCHAMP_LIBTORCH_MINIMUM)
        set(${failure}
            "${name} points at LibTorch ${version} in ${dir}; torchamp needs ${TORCHAMP_LIBTORCH_MINIMUM} or later."
            PARENT_SCOPE)
      endif()
      set(${prefix} ${dir} PARENT_SCOPE)
      set(${origin} "from ${name}" PARENT_SCOPE)
      return()
    endforeach()
    if(NOT name STREQUAL "CMAKE_PREFIX_PATH")  # CMAKE_PREFIX_PATH may name other packages
      set(${failure} "${name} is set, but there is no LibTorch in ${given}. ${_torchamp_remedy}" PARENT_SCOPE)
      return()
    endif()
  endforeach()
endfunction()

# ---- 2. The torch of a Python --------------------------------------------------------------------

# Sets `python` to the interpreter, or to nothing.
macro(_torchamp_python)
  if(NOT Python3_EXECUTABLE AND Python_EXECUTABLE)
    set(Python3_EXECUTABLE ${Python_EXECUTABLE})
  endif()
  set(Python3_FIND_STRATEGY LOCATION)  # the first Python on the PATH; an active venv comes first
  find_package(Python3 QUIET COMPONENTS Interpreter)
  set(python ${Python3_EXECUTABLE})
endmacro()

function(_torchamp_of_python prefix origin)
  if(NOT python)
    return()
  endif()
  execute_process(
    COMMAND
      ${python} -c "import importlib.util as u, os; s = u.find_spec('torch'); \
print(os.path.dirname(s.origin) if s and s.origin else '')"
    WORKING_DIRECTORY ${CMAKE_BINARY_DIR}
    OUTPUT_VARIABLE dir
    ERROR_QUIET
    OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(NOT dir)
    return()
  endif()
  file(TO_CMAKE_PATH "${dir}" dir)
  _torchamp_version(version "${dir}")
  if(NOT version OR NOT EXISTS ${dir}/lib)
    set(why "is without LibTorch")
  elseif(TORCHAMP_LIBTORCH_VERSION AND NOT version VERSION_EQUAL TORCHAMP_LIBTORCH_VERSION)
    set(why "is ${version}, not ${TORCHAMP_LIBTORCH_VERSION}")
  elseif(version VERSION_LESS TORCHAMP_LIBTORCH_MINIMUM)
    set(why "is ${version}, older than ${TORCHAMP_LIBTORCH_MINIMUM}")
  else()
    set(${prefix} ${dir} PARENT_SCOPE)
    set(${origin} "of ${python}" PARENT_SCOPE)
    return()
  endif()
  message(STATUS "torchamp: passing over the torch of ${python}, which ${why}")
endfunction()

# ---- 3. PyPI -------------------------------------------------------------------------------------

# Runs pip for each argument, a line of arguments, into ${cache}/${name}. Two builds at the same
# time wait for each other. Only a complete folder gets its name, so an interrupted build leaves
# nothing that a later build would use.
function(_torchamp_fetch folder failure name megabytes)
  set(manual "Or fetch LibTorch by hand: ${_torchamp_remedy}")
  if(NOT python)
    set(${failure} "No LibTorch found, and no Python 3 to fetch it with from PyPI. Install one (apt install \
python3 python3-venv). ${manual}" PARENT_SCOPE)
    return()
  endif()

  # The user's cache. Without HOME, the folder that the user database names.
  set(cache "$ENV{XDG_CACHE_HOME}")
  if(NOT IS_ABSOLUTE "${cache}")
    set(home "$ENV{HOME}")
    if(NOT IS_ABSOLUTE "${home}")
      execute_process(
        COMMAND ${python} -c "import os; os.environ.pop('HOME', None); print(os.path.expanduser('~'))"
        OUTPUT_VARIABLE home ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE)
    endif()
    if(NOT IS_ABSOLUTE "${home}")
      set(home ${CMAKE_BINARY_DIR})
    endif()
    set(cache ${home}/.cache)
  endif()
  set(cache ${cache}/torchamp)
  set(${folder} ${cache}/${name} PARENT_SCOPE)
  if(EXISTS ${cache}/${name})
    return()
  endif()

  execute_process(COMMAND ${CMAKE_COMMAND} -E make_directory ${cache} RESULT_VARIABLE status ERROR_QUIET)
  if(status EQUAL 0)
    file(LOCK ${cache}/lock GUARD FUNCTION TIMEOUT 0 RESULT_VARIABLE status)
    if(status MATCHES "[Tt]imeout|already|temporarily")
      message(STATUS "torchamp: waiting for another build that is fetching into ${cache}")
      file(LOCK ${cache}/lock GUARD FUNCTION TIMEOUT 3600 RESULT_VARIABLE status)
    endif()
  endif()
  if(NOT status EQUAL 0)
    set(${failure} "LibTorch is to be fetched from PyPI, but its cache ${cache} cannot be written (${status}). \
Set XDG_CACHE_HOME to a folder that can, with ${megabytes} MB free. ${manual}" PARENT_SCOPE)
    return()
  endif()
  if(EXISTS ${cache}/${name})  # the other build has fetched it
    return()
  endif()
  file(GLOB leftovers ${cache}/partial-*)
  set(partial ${cache}/partial-${name})
  file(REMOVE_RECURSE ${partial} ${leftovers})
  file(MAKE_DIRECTORY ${partial}/tmp)

  # pip, or the pip of a venv. The user's settings apply, except the settings that --target forbids.
  set(environment ${CMAKE_COMMAND} -E env --unset=PIP_PREFIX PIP_USER=0 PIP_REQUIRE_VIRTUALENV=0 TMPDIR=${partial}/tmp)
  set(pip ${python} -m pip)
  execute_process(COMMAND ${environment} ${pip} --version RESULT_VARIABLE status OUTPUT_QUIET ERROR_QUIET)
  if(NOT status EQUAL 0)
    execute_process(COMMAND ${environment} ${python} -m venv ${partial}/venv
                    RESULT_VARIABLE status OUTPUT_QUIET ERROR_QUIET)
    set(pip ${partial}/venv/bin/python -m pip)
    if(CMAKE_HOST_WIN32)
      set(pip ${partial}/venv/Scripts/python.exe -m pip)
    endif()
  endif()
  if(NOT status EQUAL 0)
    file(REMOVE_RECURSE ${partial})
    set(${failure} "No LibTorch found, and ${python} has neither pip nor a working venv module to fetch it with from \
PyPI. Install one (apt install python3-venv). ${manual}" PARENT_SCOPE)
    return()
  endif()
  message(STATUS "torchamp: fetching ${name} from PyPI into ${cache} (once for all builds; needs ${megabytes} MB of disk while it does)")
  foreach(line IN LISTS ARGN)
    if(line STREQUAL "WITH_NVIDIA_LIBRARIES")
      _torchamp_nvidia_requirements(line ${partial})
    endif()
    separate_arguments(arguments UNIX_COMMAND "${line}")
    execute_process(
      COMMAND ${environment} ${pip} install --target ${partial}/unpacked --upgrade --no-compile --only-binary=:all:
              --no-input --disable-pip-version-check --no-warn-script-location --root-user-action=ignore ${arguments}
      RESULT_VARIABLE status)
    if(NOT status EQUAL 0)
      file(REMOVE_RECURSE ${partial})
      set(${failure} "No LibTorch found, and fetching it from PyPI failed: pip's own message is above. It needs the \
network and ${megabytes} MB in ${cache} (or in the folder that XDG_CACHE_HOME names). ${manual}" PARENT_SCOPE)
      return()
    endif()
  endforeach()
  file(RENAME ${partial}/unpacked ${cache}/${name})
  file(REMOVE_RECURSE ${partial})
endfunction()

function(_torchamp_fetch_libtorch prefix failure cuda)
  set(version ${TORCHAMP_LIBTORCH_PINNED})
  if(TORCHAMP_LIBTORCH_VERSION)
    set(version ${TORCHAMP_LIBTORCH_VERSION})
  endif()
  if(version VERSION_LESS TORCHAMP_LIBTORCH_MINIMUM)
    set(${failure} "TORCHAMP_LIBTORCH_VERSION is ${version}; torchamp needs ${TORCHAMP_LIBTORCH_MINIMUM} or later."
        PARENT_SCOPE)
    return()
  endif()
  set(wheel "--no-deps torch==${version}")
  if(cuda)
    _torchamp_fetch(folder why libtorch-${version}-cuda 6000 "${wheel}" WITH_NVIDIA_LIBRARIES)
  else()
    _torchamp_fetch(folder why libtorch-${version} 1800 "${wheel}")
  endif()
  set(${prefix} ${folder}/torch PARENT_SCOPE)
  set(${failure} "${why}" PARENT_SCOPE)
endfunction()

# Of the requirements of torch's wheel, only NVIDIA's libraries, and the headers of CUDA that these
# do not have.
function(_torchamp_nvidia_requirements line partial)
  file(GLOB metadata ${partial}/unpacked/torch-*.dist-info/METADATA)
  file(STRINGS ${metadata} requirements REGEX "^Requires-Dist: (cuda-toolkit|nvidia-)")
  list(TRANSFORM requirements REPLACE "^Requires-Dist: ([^ ;]+).*$" "\\1")
  if(requirements MATCHES "cuda-toolkit[^;]*==([0-9]+[.][0-9]+)")
    list(APPEND requirements "nvidia-cuda-crt==${CMAKE_MATCH_1}.*")
  elseif(requirements MATCHES "nvidia-cuda-runtime-cu12==([0-9]+[.][0-9]+)")
    list(APPEND requirements "nvidia-cuda-nvcc-cu12==${CMAKE_MATCH_1}.*")
  endif()
  list(JOIN requirements " " requirements)
  set(${line} "${requirements}" PARENT_SCOPE)
endfunction()

# ---- The target ----------------------------------------------------------------------------------

# Whether CUDA is wanted: by TORCHAMP_CUDA, or if it is AUTO, because this machine has a device.
function(_torchamp_cuda_device result)
  if(NOT DEFINED TORCHAMP_CUDA OR TORCHAMP_CUDA STREQUAL "AUTO")
    set(${result} OFF PARENT_SCOPE)
    if(CMAKE_CROSSCOMPILING)
      return()
    endif()
    if(EXISTS /dev/nvidiactl)
      set(${result} ON PARENT_SCOPE)
    else()
      find_program(nvidia_smi nvidia-smi NO_CACHE)
      if(nvidia_smi)
        execute_process(COMMAND ${nvidia_smi} -L OUTPUT_VARIABLE list ERROR_QUIET)
        if(list MATCHES "GPU [0-9]+")
          set(${result} ON PARENT_SCOPE)
        endif()
      endif()
    endif()
  else()
    set(${result} ${TORCHAMP_CUDA} PARENT_SCOPE)
  endif()
endfunction()

# The libraries that `library` needs (`needed`), and the folders of its run path (`folders`).
function(_torchamp_dynamic_section needed folders library)
  set(lines "")
  if(CMAKE_READELF)
    execute_process(COMMAND ${CMAKE_READELF} -d ${library} OUTPUT_VARIABLE lines ERROR_QUIET)
  endif()
  cmake_path(GET library PARENT_PATH origin)
  string(REPLACE "[" "<" lines "${lines}")  # an open bracket would join a list's items
  string(REGEX MATCHALL "\\(NEEDED\\)[^<]*<[^]]+" names "${lines}")
  list(TRANSFORM names REPLACE "^.*<" "")
  string(REGEX MATCH "\\(R(UN)?PATH\\)[^<]*<([^]]+)" unused "${lines}")
  string(REPLACE ":" ";" paths "${CMAKE_MATCH_2}")
  list(TRANSFORM paths REPLACE "[$]({ORIGIN}|ORIGIN)" "${origin}")
  set(existing "")
  foreach(path IN LISTS paths)
    if(IS_DIRECTORY ${path})
      cmake_path(NORMAL_PATH path)
      list(APPEND existing ${path})
    endif()
  endforeach()
  set(${needed} "${names}" PARENT_SCOPE)
  set(${folders} "${existing}" PARENT_SCOPE)
endfunction()

# The folders of libraries that LibTorch does not find by itself: CUDA's toolkits, and the loader's
# folders. For another system, no folder of this machine is used.
function(_torchamp_toolkit_folders folders)
  if(CMAKE_CROSSCOMPILING)
    set(result "")
    foreach(root IN LISTS CUDAToolkit_ROOT)
      list(APPEND result ${root}/lib64 ${root}/lib)
    endforeach()
    set(${folders} ${result} PARENT_SCOPE)
    return()
  endif()
  set(roots ${CUDAToolkit_ROOT} $ENV{CUDAToolkit_ROOT} $ENV{CUDA_HOME} $ENV{CUDA_PATH})
  find_program(nvcc nvcc NO_CACHE)
  if(nvcc)
    file(REAL_PATH ${nvcc} nvcc)
    cmake_path(GET nvcc PARENT_PATH bin)
    cmake_path(GET bin PARENT_PATH root)
    list(APPEND roots ${root})
  endif()
  file(GLOB versions LIST_DIRECTORIES ON /usr/local/cuda-*)
  list(SORT versions COMPARE NATURAL ORDER DESCENDING)
  list(APPEND roots /usr/local/cuda ${versions} /usr/local /usr)
  set(result "")
  foreach(root IN LISTS roots)
    list(APPEND result ${root}/lib64 ${root}/lib ${root}/lib/${CMAKE_LIBRARY_ARCHITECTURE} ${root}/extras/CUPTI/lib64)
  endforeach()
  file(TO_CMAKE_PATH "$ENV{LD_LIBRARY_PATH}" loader)
  find_program(ldconfig ldconfig PATHS /sbin /usr/sbin NO_CACHE)
  if(ldconfig)
    execute_process(COMMAND ${ldconfig} -p OUTPUT_VARIABLE listing ERROR_QUIET)
    string(REGEX MATCHALL "=> /[^\n]*/" paths "${listing}")
    list(TRANSFORM paths REPLACE "^=> (.*)/$" "\\1")
    list(REMOVE_DUPLICATES paths)
    list(APPEND loader ${paths})
  endif()
  set(${folders} ${result} ${loader} PARENT_SCOPE)
endfunction()

# The folders of CUDA's and NCCL's headers for a LibTorch that needs the libraries `sonames`. Looks
# in `own`, then in `toolkit`; empty if neither has them. The layout of some objects depends on the
# versions of LibTorch's binaries and of these headers: with headers of another version, code writes
# past the end of such objects. So headers next to the libraries come first, and headers of other
# major versions are ignored.
function(_torchamp_cuda_headers includes failure sonames own toolkit)
  set(${includes} "" PARENT_SCOPE)
  set(${failure} "" PARENT_SCOPE)
  set(nccl "")
  set(cuda "")
  set(complete "")  # NVIDIA's wheel has no crt/; the toolkit or another wheel has it
  set(others "")
  set(major "")
  if(sonames MATCHES "libcudart[.]so[.]([0-9]+)")
    set(major ${CMAKE_MATCH_1})
  endif()
  set(seen "")
  foreach(folder IN LISTS own toolkit)
    cmake_path(SET include NORMALIZE ${folder}/../include)
    if(include IN_LIST seen)
      continue()
    endif()
    list(APPEND seen ${include})
    if(folder IN_LIST own AND EXISTS ${include}/nccl.h)
      list(APPEND nccl ${include})
    endif()
    if(NOT EXISTS ${include}/cuda_runtime_api.h)
      continue()
    endif()
    file(STRINGS ${include}/cuda_runtime_api.h line REGEX "define +CUDART_VERSION +[0-9]+")
    string(REGEX MATCH "CUDART_VERSION +([0-9]+)" line "${line}")
    set(version ${CMAKE_MATCH_1})
    if(NOT version)
      continue()
    endif()
    math(EXPR its_major "${version} / 1000")
    math(EXPR its_minor "${version} % 1000 / 10")
    if(major AND NOT its_major EQUAL major)
      list(APPEND others "${its_major}.${its_minor} (${include})")
      continue()
    endif()
    list(APPEND cuda ${include})
    if(EXISTS ${include}/crt/host_defines.h)
      list(APPEND complete ${include})
    endif()
  endforeach()
  # Each of CUDA 12's wheels has its own folder. The compiler's wheel has crt/.
  if(cuda AND NOT complete)
    list(GET cuda 0 first)
    cmake_path(SET nvcc NORMALIZE ${first}/../../cuda_nvcc/include)
    if(EXISTS ${nvcc}/crt/host_defines.h)
      list(APPEND complete ${nvcc})
    endif()
  endif()
  if(NOT cuda AND others)
    list(JOIN others ", " others)
    set(${failure} "loads libcudart.so.${major}, but the only headers of CUDA here are those of ${others}, which \
do not fit it: objects would have another size. Install a toolkit of CUDA ${major} and name it with \
-DCUDAToolkit_ROOT=DIR, or configure with -DTORCHAMP_CUDA=OFF." PARENT_SCOPE)
  elseif(complete)
    list(GET cuda 0 first)
    list(GET complete 0 rest)
    set(result ${nccl} ${first} ${rest})
    list(REMOVE_DUPLICATES result)
    set(${includes} "${result}" PARENT_SCOPE)
  elseif(cuda)
    list(JOIN cuda ", " cuda)
    message(STATUS "torchamp: CUDA's headers in ${cuda} lack crt/host_defines.h, which comes with a toolkit or the wheel \
nvidia-cuda-crt, for CUDA 12 nvidia-cuda-nvcc-cu12: CUDA graphs are left out")
  endif()
endfunction()

function(_torchamp_import failure prefix origin cuda)
  _torchamp_version(version ${prefix})
  set(library ${prefix}/lib/lib@${CMAKE_SHARED_LIBRARY_SUFFIX})
  if(WIN32)  # MinGW's CMake would use lib@.dll
    set(library ${prefix}/lib/@.dll)
  endif()
  set(names c10 torch_cpu)
  string(REPLACE "@" torch_hip torch_hip ${library})
  if(EXISTS ${torch_hip} AND (NOT DEFINED TORCHAMP_CUDA OR TORCHAMP_CUDA))
    set(${failure} "The LibTorch ${origin}, ${prefix}, is built for ROCm, with which torchamp has never run. Configure \
with -DTORCHAMP_CUDA=OFF to use its CPU part alone, or take a LibTorch for CUDA." PARENT_SCOPE)
    return()
  endif()
  string(REPLACE "@" torch_cuda torch_cuda ${library})
  if(cuda AND EXISTS ${torch_cuda})
    list(APPEND names c10_cuda torch_cuda)
  elseif(cuda AND TORCHAMP_CUDA AND NOT TORCHAMP_CUDA STREQUAL "AUTO")
    set(${failure} "TORCHAMP_CUDA is ${TORCHAMP_CUDA}, but the LibTorch ${origin}, ${prefix}, is built without CUDA. \
Take another one, or configure with -DTORCHAMP_CUDA=OFF." PARENT_SCOPE)
    return()
  endif()

  # Libraries that LibTorch needs and does not find by itself come from a toolkit or, for a CPU
  # build, from PyPI.
  set(link "")
  set(search "")
  set(absent "")
  set(sonames "")
  _torchamp_toolkit_folders(toolkit)
  foreach(name IN LISTS names)
    string(REPLACE "@" ${name} file ${library})
    if(NOT EXISTS ${file})
      set(${failure} "The LibTorch ${origin}, ${prefix}, lacks ${file}. Take another one." PARENT_SCOPE)
      return()
    endif()
    _torchamp_dynamic_section(needed own ${file})
    list(APPEND search ${own})
    list(FILTER needed INCLUDE REGEX "^lib(cu|nv|nccl)")
    list(APPEND sonames ${needed})
    foreach(soname IN LISTS needed)
      find_file(path ${soname} PATHS ${own} NO_DEFAULT_PATH NO_CMAKE_FIND_ROOT_PATH NO_CACHE)
      if(NOT path)
        find_file(path ${soname} PATHS ${toolkit} NO_DEFAULT_PATH NO_CMAKE_FIND_ROOT_PATH NO_CACHE)
        if(path)
          list(APPEND link ${path})
        else()
          list(APPEND absent ${soname})
        endif()
      endif()
      unset(path)
    endforeach()
  endforeach()
  list(REMOVE_DUPLICATES absent)
  if(absent AND CMAKE_CROSSCOMPILING)
    list(JOIN absent ", " absent)
    set(${failure} "The LibTorch ${origin}, ${prefix}, needs ${absent}, which neither lie beside it nor in \
CUDAToolkit_ROOT. Install the wheels that hold them into the folder that holds torch (pip install --target DIR --platform \
PLATFORM --only-binary=:all: --no-deps nvidia-cuda-runtime nvidia-cuda-cupti), or name a toolkit for that system with \
-DCUDAToolkit_ROOT=DIR." PARENT_SCOPE)
    return()
  endif()
  if(absent AND NOT "torch_cuda" IN_LIST names)
    _torchamp_runtime_libraries(found why "${absent}")
    if(why)
      set(${failure} "${why}" PARENT_SCOPE)
      return()
    endif()
    list(APPEND link ${found})
  elseif(absent)
    list(JOIN absent ", " absent)
    set(${failure} "The LibTorch ${origin}, ${prefix}, needs ${absent}, which neither lie beside it nor in a CUDA \
toolkit. Install torch with its dependencies (pip install torch==${version}), or configure with -DTORCHAMP_CUDA=OFF."
        PARENT_SCOPE)
    return()
  endif()
  list(REMOVE_DUPLICATES link)
  list(REMOVE_DUPLICATES search)
  _torchamp_cuda_headers(cuda_includes why "${sonames}" "${search}" "${toolkit}")
  if("torch_cuda" IN_LIST names)
    if(why)
      set(${failure} "The LibTorch ${origin}, ${prefix}, ${why}" PARENT_SCOPE)
      return()
    endif()
  endif()

  # An imported target's include folders are SYSTEM folders, so LibTorch's headers cause no
  # warnings.
  add_library(torchamp::libtorch INTERFACE IMPORTED GLOBAL)
  set(includes ${prefix}/include ${prefix}/include/torch/csrc/api/include)
  set(graphs 0)
  if("torch_cuda" IN_LIST names)
    list(APPEND includes ${cuda_includes})
    if(cuda_includes)
      set(graphs 1)
    endif()
  endif()
  target_include_directories(torchamp::libtorch INTERFACE ${includes})
  # Set here, whatever is on the include path: without torch_cuda, nothing of it may be used.
  target_compile_definitions(torchamp::libtorch INTERFACE TORCHAMP_CUDA_GRAPHS=${graphs})
  target_compile_features(torchamp::libtorch INTERFACE cxx_std_20)
  target_compile_options(
    torchamp::libtorch INTERFACE $<$<CXX_COMPILER_ID:MSVC>:/Zc:__cplusplus;/Zc:preprocessor;/bigobj;/utf-8>)
  # PyPI's LibTorch before 2.7 has std::string from before C++11. Its own package has this flag.
  set(old_abi FALSE)
  if(EXISTS ${prefix}/share/cmake/Torch/TorchConfig.cmake)
    file(STRINGS ${prefix}/share/cmake/Torch/TorchConfig.cmake old_abi REGEX "-D_GLIBCXX_USE_CXX11_ABI=0")
  endif()
  if(old_abi)
    target_compile_definitions(torchamp::libtorch INTERFACE _GLIBCXX_USE_CXX11_ABI=0)
    set(old_abi TRUE)
  endif()
  list(TRANSFORM search PREPEND "LINKER:-rpath-link,")
  target_link_options(torchamp::libtorch INTERFACE ${search})
  foreach(name IN LISTS names)
    string(REPLACE "@" ${name} file ${library})
    add_library(torchamp::${name} SHARED IMPORTED GLOBAL)
    set_target_properties(torchamp::${name} PROPERTIES IMPORTED_LOCATION ${file})
    if(WIN32)
      set_target_properties(torchamp::${name} PROPERTIES IMPORTED_IMPLIB ${prefix}/lib/${name}.lib)
    endif()
  endforeach()
  list(TRANSFORM names PREPEND torchamp:: OUTPUT_VARIABLE targets)
  target_link_libraries(torchamp::libtorch INTERFACE ${targets})
  # Nothing calls these by name, so the linker would omit them. They are one item, so that CMake
  # does not separate them.
  if("torch_cuda" IN_LIST names)
    list(APPEND link ${torch_cuda})
    # The loader finds the libraries that NVIDIA's libraries need, as in Python.
    target_link_options(torchamp::libtorch INTERFACE LINKER:--allow-shlib-undefined)
  endif()
  if(link)
    list(JOIN link "\" \"" files)
    target_link_libraries(
      torchamp::libtorch INTERFACE ${link} "-Wl,--push-state,--no-as-needed \"${files}\" -Wl,--pop-state")
  endif()
  set(mode CPU)
  if("torch_cuda" IN_LIST names)
    set(mode CUDA)
  endif()
  set_target_properties(torchamp::libtorch PROPERTIES TORCHAMP_DEVICE ${mode} TORCHAMP_PREFIX ${prefix}
                                                      TORCHAMP_OLD_ABI "${old_abi}"
                                                      TORCHAMP_CUDA_HEADERS "${cuda_includes}")
  message(STATUS "torchamp: LibTorch ${version} for ${mode}, ${origin}: ${prefix}")
endfunction()

# The CUDA runtime libraries that torch_cpu names, so that a CPU program loads them: two small
# wheels.
function(_torchamp_runtime_libraries files failure sonames)
  set(requirements "")
  foreach(soname IN LISTS sonames)
    if(NOT soname MATCHES "^lib(cudart|cupti)[.]so[.]([0-9]+)$")
      set(${failure} "LibTorch needs ${soname}, which is not on this machine. Install it." PARENT_SCOPE)
      return()
    endif()
    set(major ${CMAKE_MATCH_2})
    math(EXPR next "${major} + 1")
    string(REPLACE cudart runtime name ${CMAKE_MATCH_1})
    if(major LESS 13)
      list(APPEND requirements nvidia-cuda-${name}-cu${major})
    else()
      list(APPEND requirements "'nvidia-cuda-${name}>=${major},<${next}'")
    endif()
  endforeach()
  list(JOIN requirements " " line)
  if(NOT python)
    _torchamp_python()
  endif()
  _torchamp_fetch(folder why cuda-runtime-${major} 50 "--no-deps ${line}")
  set(result "")
  foreach(soname IN LISTS sonames)
    file(GLOB_RECURSE found ${folder}/nvidia/${soname})
    list(APPEND result ${found})
  endforeach()
  set(${files} "${result}" PARENT_SCOPE)
  set(${failure} "${why}" PARENT_SCOPE)
endfunction()
