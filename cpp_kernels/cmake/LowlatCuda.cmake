# Finds nvcc and turns CMake's CUDA language on. LOWLAT_CUDA says whether: AUTO takes an nvcc that
# is there and new enough, ON fails without one, OFF looks for none. Sets LOWLAT_HAVE_CUDA.
#
# nvcc comes from CUDACXX, CUDA_HOME, CUDA_PATH, PATH, /usr/local/cuda or, last, the pip packages
# (`LOWLAT_PIP_CUDA=1 pip install .` fetches them into the build's environment). Nothing links
# libcuda, and the runtime is linked statically: the library loads on a machine without a driver.
set(LOWLAT_CUDA AUTO CACHE STRING "build the CUDA kernels: AUTO, ON or OFF")
set_property(CACHE LOWLAT_CUDA PROPERTY STRINGS AUTO ON OFF)
set(LOWLAT_CUDA_ARCHS 90a CACHE STRING "architectures of the CUDA kernels, as 90a;100a;103a")
set(LOWLAT_HAVE_CUDA OFF)
# The oldest with what the kernels use and the one that is tested.
set(_oldest 13.0)

# A cached value of another build's environment may be gone, so nothing is cached.
function(lowlat_find_nvcc out)
  set(${out} "" PARENT_SCOPE)
  if(DEFINED ENV{CUDACXX})
    set(${out} $ENV{CUDACXX} PARENT_SCOPE)
    return()
  endif()
  find_program(_nvcc nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATH_SUFFIXES bin
    PATHS /usr/local/cuda NO_CACHE)
  if(NOT _nvcc)
    find_package(Python 3.10 QUIET COMPONENTS Interpreter)
    if(Python_EXECUTABLE)
      execute_process(COMMAND ${Python_EXECUTABLE} -c "
import importlib.util
from pathlib import Path
spec = importlib.util.find_spec('nvidia')
places = spec.submodule_search_locations if spec else []
found = [p for place in places for p in Path(place).glob('cu1[3-9]/bin/nvcc')]
print(max(found, default=''), end='')"
        OUTPUT_VARIABLE _nvcc ERROR_QUIET)
    endif()
  endif()
  if(_nvcc)
    set(${out} ${_nvcc} PARENT_SCOPE)
  endif()
endfunction()

if(NOT LOWLAT_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "LOWLAT_CUDA is ${LOWLAT_CUDA}; needed AUTO, ON or OFF")
endif()
if(NOT LOWLAT_CUDA STREQUAL "OFF")
  lowlat_find_nvcc(_nvcc)
  set(_why "")
  if(NOT _nvcc)
    set(_why "no nvcc: set CUDACXX, or build with LOWLAT_PIP_CUDA=1 pip install")
  else()
    execute_process(COMMAND ${_nvcc} --version OUTPUT_VARIABLE _said ERROR_QUIET)
    string(REGEX MATCH "release ([0-9.]+)" _release "${_said}")
    if(NOT _release)
      set(_why "${_nvcc} --version names no release: set CUDACXX to a working nvcc")
    elseif(CMAKE_MATCH_1 VERSION_LESS ${_oldest})
      set(_why "${_nvcc} is CUDA ${CMAKE_MATCH_1}; needed ${_oldest} or newer (set CUDACXX)")
    endif()
  endif()
  if(_why AND LOWLAT_CUDA STREQUAL "ON")
    message(FATAL_ERROR "LOWLAT_CUDA=ON, but ${_why}")
  elseif(_why)
    message(STATUS "without CUDA kernels: ${_why}")
  else()
    set(CMAKE_CUDA_COMPILER ${_nvcc})
    cmake_path(GET _nvcc PARENT_PATH _bin)
    cmake_path(GET _bin PARENT_PATH _root)
    if(NOT EXISTS ${_root}/lib64)  # pip's layout has lib/ only, and nvcc.profile names lib64
      string(APPEND CMAKE_CUDA_FLAGS " -L${_root}/lib")
    endif()
    set(CMAKE_CUDA_ARCHITECTURES OFF)  # given as -gencode, because CMake 3.25 knows no 103a
    set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
    set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
    set(CMAKE_CUDA_FLAGS_RELEASE "-O3")
    enable_language(CUDA)
    set(LOWLAT_HAVE_CUDA ON)
    list(JOIN LOWLAT_CUDA_ARCHS ", sm_" _names)
    message(STATUS "CUDA kernels: ${_nvcc}, sm_${_names}")
  endif()
endif()

# What every CUDA file of ours is compiled with. As for C++, a product and a sum become one rounding
# only where the source says fma.
add_library(lowlat_cuda_flags INTERFACE)
if(LOWLAT_HAVE_CUDA)
  set(_flags -std=c++20 -fmad=false --expt-relaxed-constexpr -Werror=all-warnings
    -Xcompiler=-Wall,-Wextra)
  foreach(_arch IN LISTS LOWLAT_CUDA_ARCHS)
    list(APPEND _flags -gencode=arch=compute_${_arch},code=sm_${_arch})
  endforeach()
  target_compile_options(lowlat_cuda_flags INTERFACE "$<$<COMPILE_LANGUAGE:CUDA>:${_flags}>")
  list(JOIN LOWLAT_CUDA_ARCHS " sm_" _names)
  target_compile_definitions(lowlat_cuda_flags INTERFACE
    LOWLAT_HAVE_CUDA=1 LOWLAT_CUDA_ARCHS="sm_${_names}")
  target_include_directories(lowlat_cuda_flags INTERFACE ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
endif()
