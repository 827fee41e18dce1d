# SPDX-License-Identifier: BSD-3-Clause
# Configures tests/libtorch in every situation: LibTorch is found, fetched or missing. Nothing is downloaded: PyPI is a
# folder with a tiny wheel, and LibTorch is a folder with a version file.
#
#   cmake -DSOURCE=DIR -DWORK=DIR -DCXX=PATH -DPYTHON=PATH -P run.cmake

file(REMOVE_RECURSE ${WORK})
file(MAKE_DIRECTORY ${WORK}/home ${WORK}/empty)
set(failed 0)

# ---- Parts of the situations ----------------------------------------------------------------------

# A folder that looks like LibTorch `version`, with the given libraries.
function(make_libtorch dir version)
  string(REPLACE "." ";" parts ${version})
  list(GET parts 0 major)
  list(GET parts 1 minor)
  file(WRITE ${dir}/include/torch/headeronly/version.h
       "#define TORCH_VERSION_MAJOR ${major}\n#define TORCH_VERSION_MINOR ${minor}\n#define TORCH_VERSION_PATCH 0\n")
  file(WRITE ${dir}/share/cmake/Torch/TorchConfig.cmake "message(FATAL_ERROR \"not to be used\")\n")
  foreach(name IN LISTS ARGN)
    file(WRITE ${dir}/lib/lib${name}.so "")
  endforeach()
endfunction()

# A folder of wheels for pip that holds a torch `version`.
function(make_wheel version)
  set(tree ${WORK}/wheel-${version})
  make_libtorch(${tree}/torch ${version} c10 torch_cpu)
  file(WRITE ${tree}/torch/__init__.py "raise RuntimeError('torch must not be imported')\n")
  set(info ${tree}/torch-${version}.dist-info)
  file(WRITE ${info}/METADATA "Metadata-Version: 2.1\nName: torch\nVersion: ${version}\nRequires-Dist: sympy\n")
  file(WRITE ${info}/WHEEL "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
  file(GLOB_RECURSE files RELATIVE ${tree} ${tree}/*)
  list(JOIN files ",,\n" record)
  file(WRITE ${info}/RECORD "${record},,\n")
  file(MAKE_DIRECTORY ${WORK}/wheels)
  execute_process(
    COMMAND ${CMAKE_COMMAND} -E tar cf ${WORK}/wheels/torch-${version}-py3-none-any.whl --format=zip torch
            torch-${version}.dist-info WORKING_DIRECTORY ${tree} COMMAND_ERROR_IS_FATAL ANY)
endfunction()

# A program that replaces Python: `line` is a shell script with Python's arguments.
function(make_python path line)
  file(WRITE ${path} "#!/bin/sh\n${line}\n")
  file(CHMOD ${path} PERMISSIONS OWNER_READ OWNER_WRITE OWNER_EXECUTE)
endfunction()

# A LibTorch with CUDA whose libraries name libcudart of `major` and look for it in nvidia/cuda/lib.
function(make_cuda_libtorch dir major)
  make_libtorch(${dir}/torch 2.12.0 c10 torch_cpu c10_cuda)
  file(WRITE ${dir}/empty.cpp "")
  file(MAKE_DIRECTORY ${dir}/nvidia/cuda/lib ${dir}/nvidia/nccl/lib)
  set(runtime ${dir}/nvidia/cuda/lib/libcudart.so.${major})
  execute_process(
    COMMAND ${CXX} -shared -fPIC -nostdlib -Wl,-soname,libcudart.so.${major} ${dir}/empty.cpp -o ${runtime}
    COMMAND_ERROR_IS_FATAL ANY)
  execute_process(
    COMMAND ${CXX} -shared -fPIC -nostdlib -Wl,--no-as-needed ${dir}/empty.cpp ${runtime}
            -Wl,-rpath,$ORIGIN/../../nvidia/nccl/lib:$ORIGIN/../../nvidia/cuda/lib -o
            ${dir}/torch/lib/libtorch_cuda.so COMMAND_ERROR_IS_FATAL ANY)
endfunction()

# The parts of the headers of CUDA `version` that CMake reads. For a toolkit also crt/, which NVIDIA's wheels lack.
function(make_cuda_headers include version)
  file(WRITE ${include}/cuda_runtime_api.h "#define CUDART_VERSION  ${version}\n")
  if(ARGN)
    file(WRITE ${include}/crt/host_defines.h "")
    file(WRITE ${include}/nccl.h "")
  endif()
endfunction()

# try(NAME EXPECT regex… [REFUSE regex…] [ENV …] [ARGS …]): configures once and checks the output.
function(try name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "EXPECT;REFUSE;ENV;ARGS")
  string(MAKE_C_IDENTIFIER ${name} id)
  execute_process(
    COMMAND
      ${CMAKE_COMMAND} -E env --unset=Torch_ROOT --unset=TORCH_ROOT --unset=CMAKE_PREFIX_PATH
      --unset=XDG_CACHE_HOME --unset=VIRTUAL_ENV --unset=CONDA_PREFIX --unset=PYTHONPATH HOME=${WORK}/home
      PIP_NO_INDEX=1 PIP_FIND_LINKS=${WORK}/wheels ${arg_ENV} #
      ${CMAKE_COMMAND} -S ${SOURCE}/tests/libtorch -B ${WORK}/build/${id} -DTORCHAMP_SOURCE=${SOURCE}
      -DCMAKE_CXX_COMPILER=${CXX} -DTORCHAMP_CUDA=OFF -DPython3_EXECUTABLE=${PYTHON} ${arg_ARGS}
    OUTPUT_VARIABLE output ERROR_VARIABLE output)
  string(REGEX REPLACE "[ \n]+" " " flat "${output}")  # CMake wraps its messages
  foreach(regex IN LISTS arg_EXPECT)
    if(NOT flat MATCHES "${regex}")
      message("FAILED: ${name}\nexpected: ${regex}\noutput:\n${output}")
      set(failed 1 PARENT_SCOPE)
      return()
    endif()
  endforeach()
  foreach(regex IN LISTS arg_REFUSE)
    if(flat MATCHES "${regex}")
      message("FAILED: ${name}\nrefused: ${regex}\noutput:\n${output}")
      set(failed 1 PARENT_SCOPE)
      return()
    endif()
  endforeach()
  message("passed: ${name}")
endfunction()

# The machine's Python, without the torch that it may have.
set(machine ${PYTHON})
set(PYTHON ${WORK}/python)
make_python(${PYTHON} "case \"$*\" in *find_spec*) set -- -S \"$@\";; esac; exec ${machine} \"$@\"")

make_libtorch(${WORK}/given/libtorch 2.12.0 c10 torch_cpu)
make_libtorch(${WORK}/old 2.5.0 c10 torch_cpu)
make_libtorch(${WORK}/partial 2.12.0 c10)
make_libtorch(${WORK}/cuda 2.12.0 c10 torch_cpu c10_cuda torch_cuda)
make_cuda_libtorch(${WORK}/cuda7 7)
make_cuda_headers(${WORK}/toolkit6/include 6050 TOOLKIT)
make_cuda_headers(${WORK}/toolkit7/include 7000 TOOLKIT)
file(MAKE_DIRECTORY ${WORK}/toolkit6/lib ${WORK}/toolkit7/lib)
make_wheel(2.15.0)
make_wheel(2.11.0)
set(site ${WORK}/wheel-2.11.0)
set(cache ${WORK}/home/.cache/torchamp)

# ---- The LibTorch that the user names comes first -------------------------------------------------

try("the prefix itself" ARGS -DCMAKE_PREFIX_PATH=${WORK}/given/libtorch
    EXPECT "RESULT CPU ${WORK}/given/libtorch" REFUSE fetching)
try("the folder it was unpacked in" ARGS -DCMAKE_PREFIX_PATH=${WORK}/given
    EXPECT "RESULT CPU ${WORK}/given/libtorch")
try("torch.utils.cmake_prefix_path" ARGS -DCMAKE_PREFIX_PATH=${WORK}/given/libtorch/share/cmake
    EXPECT "RESULT CPU ${WORK}/given/libtorch")
try("CMAKE_PREFIX_PATH of the environment" ENV CMAKE_PREFIX_PATH=${WORK}/empty:${WORK}/given/libtorch
    EXPECT "RESULT CPU ${WORK}/given/libtorch")
try("Torch_DIR" ARGS -DTorch_DIR=${WORK}/given/libtorch/share/cmake/Torch
    EXPECT "RESULT CPU ${WORK}/given/libtorch")
try("Torch_ROOT before CMAKE_PREFIX_PATH" ARGS -DTorch_ROOT=${WORK}/given -DCMAKE_PREFIX_PATH=${WORK}/old
    EXPECT "RESULT CPU ${WORK}/given/libtorch")
try("Torch_ROOT without a LibTorch" ARGS -DTorch_ROOT=${WORK}/empty
    EXPECT "torchamp: Torch_ROOT is set, but there is no LibTorch in ${WORK}/empty. Point at one" REFUSE fetching)
try("an old LibTorch" ARGS -DCMAKE_PREFIX_PATH=${WORK}/old
    EXPECT "points at LibTorch 2.5.0 in ${WORK}/old. torchamp needs 2.6.0 or later")
try("a LibTorch with today's strings" ARGS -DCMAKE_PREFIX_PATH=${WORK}/given REFUSE _GLIBCXX_USE_CXX11_ABI)
file(WRITE ${WORK}/given/libtorch/share/cmake/Torch/TorchConfig.cmake
     "if(TRUE)\n  set(TORCH_CXX_FLAGS \"-D_GLIBCXX_USE_CXX11_ABI=0\")\nendif()\n")
try("a LibTorch with the strings before C++11" ARGS -DCMAKE_PREFIX_PATH=${WORK}/given
    EXPECT "DEFINITIONS .*_GLIBCXX_USE_CXX11_ABI=0")
# ---- The compiler ---------------------------------------------------------------------------------

# Debian's g++ has both libraries; another compiler may have no static one.
file(WRITE ${WORK}/main.cpp "#include <iostream>\nint main() { std::cout << 1; }\n")
execute_process(COMMAND ${CXX} -static-libstdc++ ${WORK}/main.cpp -o ${WORK}/main RESULT_VARIABLE status ERROR_QUIET)
if(status EQUAL 0)
  try("a compiler that links libstdc++ statically"
      ARGS -DCMAKE_PREFIX_PATH=${WORK}/given -DCMAKE_CXX_FLAGS=-static-libstdc++
      EXPECT "torchamp: .* links libstdc\\+\\+ statically.*Take another compiler with -DCMAKE_CXX_COMPILER=PATH"
      REFUSE RESULT)
  try("the linker's flags say so" ARGS -DCMAKE_PREFIX_PATH=${WORK}/given -DCMAKE_EXE_LINKER_FLAGS=-static-libstdc++
      EXPECT "links libstdc\\+\\+ statically" REFUSE RESULT)
endif()
try("a compiler that links it dynamically" ARGS -DCMAKE_PREFIX_PATH=${WORK}/given REFUSE "links libstdc")

# ---- Other systems --------------------------------------------------------------------------------

set(cross -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=other)
try("a cross build takes no Python's LibTorch and fetches none" ARGS ${cross}
    EXPECT "for Linux on other, so that LibTorch is neither taken from this machine's Python nor fetched. Point at one"
    REFUSE fetching RESULT)
try("a cross build takes what the user points at" ARGS ${cross} -DCMAKE_PREFIX_PATH=${WORK}/given
    EXPECT "RESULT CPU ${WORK}/given/libtorch")
make_libtorch(${WORK}/rocm 2.12.0 c10 torch_cpu c10_hip torch_hip)
try("a LibTorch for ROCm" ARGS -DCMAKE_PREFIX_PATH=${WORK}/rocm -DTORCHAMP_CUDA=AUTO
    EXPECT "is built for ROCm, with which torchamp has never run. Configure with -DTORCHAMP_CUDA=OFF" REFUSE RESULT)
try("a LibTorch for ROCm, its CPU part" ARGS -DCMAKE_PREFIX_PATH=${WORK}/rocm EXPECT "RESULT CPU ${WORK}/rocm")

try("a LibTorch that lacks a library" ARGS -DCMAKE_PREFIX_PATH=${WORK}/partial
    EXPECT "lacks ${WORK}/partial/lib/libtorch_cpu.so")

# ---- CUDA -----------------------------------------------------------------------------------------

try("CUDA from a LibTorch without it" ARGS -DCMAKE_PREFIX_PATH=${WORK}/given -DTORCHAMP_CUDA=ON
    EXPECT "is built without CUDA. Take another one, or configure with -DTORCHAMP_CUDA=OFF")
try("CUDA from a LibTorch with it" ARGS -DCMAKE_PREFIX_PATH=${WORK}/cuda -DTORCHAMP_CUDA=ON
    EXPECT "RESULT CUDA ${WORK}/cuda")
try("no CUDA from a LibTorch with it" ARGS -DCMAKE_PREFIX_PATH=${WORK}/cuda EXPECT "RESULT CPU ${WORK}/cuda")

# Headers of CUDA that do not fit LibTorch's binaries would have objects of another size.
set(on_cuda7 ARGS -DCMAKE_PREFIX_PATH=${WORK}/cuda7/torch -DTORCHAMP_CUDA=ON)
set(toolkits -DCUDAToolkit_ROOT=${WORK}/toolkit6 ENV CUDA_HOME=${WORK}/toolkit7)
try("CUDA of another version only" ${on_cuda7} -DCUDAToolkit_ROOT=${WORK}/toolkit6
    EXPECT "loads libcudart.so.7, but the only headers of CUDA here are those of 6.5 \\(${WORK}/toolkit6/include\\)"
           "-DCUDAToolkit_ROOT=DIR, or configure with -DTORCHAMP_CUDA=OFF")
try("the toolkit of the right version" ${on_cuda7} ${toolkits}
    EXPECT "HEADERS ${WORK}/toolkit7/include --" "RESULT CUDA")
make_cuda_headers(${WORK}/cuda7/nvidia/cuda/include 7050)
file(WRITE ${WORK}/cuda7/nvidia/nccl/include/nccl.h "")
set(own ${WORK}/cuda7/nvidia/nccl/include ${WORK}/cuda7/nvidia/cuda/include)
try("headers beside LibTorch's libraries first" ${on_cuda7} ${toolkits}
    EXPECT "HEADERS ${own};${WORK}/toolkit7/include --" "RESULT CUDA")

try("headers that NVIDIA's wheel leaves out" ${on_cuda7} -DCUDAToolkit_ROOT=${WORK}/toolkit6
    EXPECT "headers in ${WORK}/cuda7/nvidia/cuda/include lack crt/host_defines.h.* CUDA graphs are left out" "RESULT CUDA")

# CUDA 12's wheels: a folder for each library, and crt/ in the compiler's wheel.
file(WRITE ${WORK}/cuda7/nvidia/cuda_nvcc/include/crt/host_defines.h "")
try("headers in the folder of NVIDIA's compiler" ${on_cuda7} -DCUDAToolkit_ROOT=${WORK}/toolkit6
    EXPECT "HEADERS [^ ]*${WORK}/cuda7/nvidia/cuda/include;${WORK}/cuda7/nvidia/cuda_nvcc/include --" REFUSE "left out")

# ---- The torch of a Python ------------------------------------------------------------------------

try("the torch of a Python" ENV PYTHONPATH=${site} EXPECT "RESULT CPU ${site}/torch" REFUSE fetching)
try("the Python that is told under its other name" ENV PYTHONPATH=${site}
    ARGS -UPython3_EXECUTABLE -DPython_EXECUTABLE=${PYTHON} EXPECT "RESULT CPU ${site}/torch")

# ---- PyPI -----------------------------------------------------------------------------------------

file(WRITE ${cache}/partial-libtorch-2.15.0/unpacked/torch/include/torch/headeronly/version.h "")
try("fetched, after an interrupted build" EXPECT "fetching libtorch-2.15.0 from PyPI into ${cache}" "RESULT CPU ${cache}/libtorch-2.15.0/torch")
file(GLOB leftovers ${cache}/partial-*)
if(leftovers)
  message("FAILED: leftovers in the cache: ${leftovers}")
  set(failed 1)
endif()
try("fetched once" EXPECT "RESULT CPU ${cache}/libtorch-2.15.0/torch" REFUSE "fetching")
try("another version is asked for" ENV PYTHONPATH=${WORK}/wheel-2.15.0 ARGS -DTORCHAMP_LIBTORCH_VERSION=2.11.0
    EXPECT "passing over the torch of .* which is 2.15.0, not 2.11.0" "RESULT CPU ${cache}/libtorch-2.11.0/torch")
try("a version that is too old" ARGS -DTORCHAMP_LIBTORCH_VERSION=2.4.0
    EXPECT "TORCHAMP_LIBTORCH_VERSION is 2.4.0. torchamp needs 2.6.0 or later")
try("XDG_CACHE_HOME" ENV XDG_CACHE_HOME=${WORK}/xdg EXPECT "RESULT CPU ${WORK}/xdg/torchamp/libtorch-2.15.0/torch")
try("settings that forbid --target" ENV XDG_CACHE_HOME=${WORK}/xdg2 PIP_USER=1 PIP_PREFIX=${WORK}/p PIP_REQUIRE_VIRTUALENV=1
    EXPECT "RESULT CPU ${WORK}/xdg2/torchamp/libtorch-2.15.0/torch")

# Two builds at the same time: one fetches, the other waits and uses the result.
make_python(${WORK}/slow "case \"$*\" in *'pip install'*) sleep 2;; esac; exec ${PYTHON} \"$@\"")
set(both ${CMAKE_COMMAND} -E env XDG_CACHE_HOME=${WORK}/race PIP_NO_INDEX=1 PIP_FIND_LINKS=${WORK}/wheels ${CMAKE_COMMAND}
    -S ${SOURCE}/tests/libtorch -DTORCHAMP_SOURCE=${SOURCE} -DCMAKE_CXX_COMPILER=${CXX} -DTORCHAMP_CUDA=OFF
    -DPython3_EXECUTABLE=${WORK}/slow -B)
execute_process(
  COMMAND sh -c "\"$@\" ${WORK}/race1 >${WORK}/race1.log 2>&1 & \"$@\" ${WORK}/race2 >${WORK}/race2.log 2>&1; wait" sh ${both})
set(seen "")
foreach(i 1 2)
  file(READ ${WORK}/race${i}.log log)
  string(REGEX MATCHALL "fetching libtorch|waiting for another build" what "${log}")
  list(APPEND seen ${what})
  if(NOT log MATCHES "RESULT CPU ${WORK}/race/torchamp/libtorch-2.15.0/torch")
    message("FAILED: two builds at once\n${log}")
    set(failed 1)
  endif()
endforeach()
list(SORT seen)
if(NOT seen STREQUAL "fetching libtorch;waiting for another build")
  message("FAILED: two builds at once said: ${seen}")
  set(failed 1)
endif()

# ---- Errors ---------------------------------------------------------------------------------------

set(nowhere ENV XDG_CACHE_HOME=${WORK}/none)
try("no Python" ${nowhere} ARGS -DCMAKE_DISABLE_FIND_PACKAGE_Python3=ON -UPython3_EXECUTABLE
    EXPECT "no Python 3 to fetch it with from PyPI. Install one" "CMAKE_PREFIX_PATH=DIR")
make_python(${WORK}/bare "case \"$*\" in *'-m pip'*|*'-m venv'*) exit 1;; esac; exec ${PYTHON} \"$@\"")
try("no pip and no venv" ${nowhere} ARGS -DPython3_EXECUTABLE=${WORK}/bare
    EXPECT "has neither pip nor a working venv module" "apt install python3-venv")
try("no network" ENV XDG_CACHE_HOME=${WORK}/none PIP_FIND_LINKS=
    EXPECT "fetching it from PyPI failed: pip's own message is above. It needs the network and [0-9]+ MB in ${WORK}/none")
try("a cache that cannot be written" ENV XDG_CACHE_HOME=/dev/null/cache
    EXPECT "its cache /dev/null/cache/torchamp cannot be written" "Set XDG_CACHE_HOME")
file(GLOB rest ${WORK}/none/torchamp/*)
list(FILTER rest EXCLUDE REGEX "/lock$")
if(rest)
  message("FAILED: a failed fetch left ${rest}")
  set(failed 1)
endif()

if(failed)
  message(FATAL_ERROR "some situations failed")
endif()
