# Code objects of the platform amd, for gfx942 and gfx950, by a clang without ROCm (amd_compile.py
# says which). LOWLAT_HIP: AUTO builds them where such a compiler is there, ON fails without one,
# OFF looks for none. LOWLAT_HIP_FETCHED names a folder that may hold a fetched compiler. Sets
# LOWLAT_HAVE_HIP and LOWLAT_HIP_SOURCES, an assembly file that holds the code objects of the
# resident schedule for the kernels' library. Nothing links a HIP runtime: the host opens it when a
# model asks for it.
set(LOWLAT_HIP AUTO CACHE STRING "build the AMD code objects: AUTO, ON or OFF")
set_property(CACHE LOWLAT_HIP PROPERTY STRINGS AUTO ON OFF)
set(LOWLAT_HIP_FETCHED "" CACHE PATH "folder of a fetched compiler for AMD code objects")
set(LOWLAT_HAVE_HIP OFF)
set(LOWLAT_HIP_SOURCES "")
set(_hip_archs gfx942 gfx950)
if(NOT LOWLAT_HIP MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "LOWLAT_HIP is ${LOWLAT_HIP}; needed AUTO, ON or OFF")
endif()
if(NOT LOWLAT_HIP STREQUAL "OFF")
  find_package(Python 3.10 QUIET COMPONENTS Interpreter)
  set(_why "no Python 3.10, which runs the AMD compiler's script")
  if(Python_EXECUTABLE)
    set(_compile ${Python_EXECUTABLE} ${CMAKE_CURRENT_LIST_DIR}/amd_compile.py)
    if(LOWLAT_HIP_FETCHED)
      list(APPEND _compile --fetched ${LOWLAT_HIP_FETCHED})
    endif()
    execute_process(COMMAND ${_compile} --find OUTPUT_VARIABLE _hip_clang ERROR_VARIABLE _why
      OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_STRIP_TRAILING_WHITESPACE)
  endif()
  if(_why AND LOWLAT_HIP STREQUAL "ON")
    message(FATAL_ERROR "LOWLAT_HIP=ON, but ${_why}")
  elseif(_why)
    message(STATUS "without AMD code objects: ${_why}")
  else()
    set(LOWLAT_HAVE_HIP ON)
    message(STATUS "AMD code objects: ${_hip_clang}, ${_hip_archs}")
  endif()
endif()

if(LOWLAT_HAVE_HIP)
  set(_kernels ${CMAKE_CURRENT_SOURCE_DIR}/cpp_kernels)
  file(GLOB _hip_sources CONFIGURE_DEPENDS ${_kernels}/host/amd/*.hip)
  # clang writes no list of headers in this mode, so all that a kernel may include are named.
  file(GLOB_RECURSE _hip_headers CONFIGURE_DEPENDS ${_kernels}/platform/*.hpp
    ${_kernels}/stages/*.hpp ${_kernels}/persistent/*.hpp ${_kernels}/shape/*.hpp
    ${_kernels}/include/*.h ${_kernels}/host/amd/*.hpp)
  set(_hip_out ${CMAKE_CURRENT_BINARY_DIR}/amd)
  set(_hip_objects "")
  foreach(_source IN LISTS _hip_sources)
    cmake_path(GET _source STEM _name)
    foreach(_arch IN LISTS _hip_archs)
      add_custom_command(OUTPUT ${_hip_out}/${_name}.${_arch}.hsaco
        BYPRODUCTS ${_hip_out}/${_name}.${_arch}.s
        COMMAND ${_compile} --arch ${_arch} --out ${_hip_out} ${_source}
        DEPENDS ${_source} ${_hip_headers} ${CMAKE_CURRENT_LIST_DIR}/amd_compile.py
        COMMENT "AMD code object ${_name}.${_arch}" VERBATIM)
      list(APPEND _hip_objects ${_hip_out}/${_name}.${_arch}.hsaco)
    endforeach()
  endforeach()
  add_custom_target(lowlat_amd DEPENDS ${_hip_objects})
  enable_language(ASM)
  set(LOWLAT_HIP_SOURCES ${_hip_out}/code_objects.S)
  set(_text "/* The code objects of step.hip, as host/amd/hip.cpp finds them. */\n")
  string(APPEND _text ".section .rodata\n")
  foreach(_arch IN LISTS _hip_archs)
    set(_symbol lowlat_amd_step_${_arch})
    string(APPEND _text ".global ${_symbol}\n.hidden ${_symbol}\n.balign 4096\n${_symbol}:\n"
      ".incbin \"${_hip_out}/step.${_arch}.hsaco\"\n")
  endforeach()
  string(APPEND _text ".section .note.GNU-stack,\"\",%progbits\n")
  file(CONFIGURE OUTPUT ${LOWLAT_HIP_SOURCES} CONTENT "${_text}" @ONLY)
  set_source_files_properties(${LOWLAT_HIP_SOURCES} PROPERTIES
    OBJECT_DEPENDS "${_hip_out}/step.gfx942.hsaco;${_hip_out}/step.gfx950.hsaco")
endif()
