# lowlat._kernels by pybind11, and the kernel library beside it in lowlat/_lib.
#
# pybind11 compiles against Python.h. LOWLAT_PYTHON_HEADERS names directories to take it from when
# the interpreter has none of its own (`make setup` fetches them; see python_headers.py).
find_package(Python 3.10 REQUIRED COMPONENTS Interpreter)
execute_process(
  COMMAND ${Python_EXECUTABLE} ${CMAKE_CURRENT_LIST_DIR}/python_headers.py
    --fetched "${LOWLAT_PYTHON_HEADERS}"
  OUTPUT_VARIABLE _headers ERROR_VARIABLE _why RESULT_VARIABLE _failed
  OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_STRIP_TRAILING_WHITESPACE)
if(_failed)
  message(FATAL_ERROR "${_why}")
endif()
list(GET _headers 0 Python_INCLUDE_DIR)
find_package(Python 3.10 REQUIRED COMPONENTS Interpreter Development.Module)
set(PYBIND11_FINDPYTHON ON)
find_package(pybind11 3 QUIET CONFIG)
if(NOT pybind11_FOUND)
  execute_process(COMMAND ${Python_EXECUTABLE} -m pybind11 --cmakedir
    OUTPUT_VARIABLE pybind11_DIR OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  find_package(pybind11 3 REQUIRED CONFIG)
endif()
pybind11_add_module(_kernels
  ${CMAKE_CURRENT_SOURCE_DIR}/cpp_kernels/py/hosted.cpp
  ${CMAKE_CURRENT_SOURCE_DIR}/cpp_kernels/py/kernels_module.cpp
  ${CMAKE_CURRENT_SOURCE_DIR}/cpp_kernels/py/watch.cpp)
target_link_libraries(_kernels PRIVATE lowlat_flags lowlat_kernels)
target_include_directories(_kernels SYSTEM PRIVATE ${_headers})
set_target_properties(_kernels PROPERTIES INSTALL_RPATH "$ORIGIN/_lib")
install(TARGETS _kernels LIBRARY DESTINATION lowlat)
install(TARGETS lowlat_kernels LIBRARY DESTINATION lowlat/_lib)
