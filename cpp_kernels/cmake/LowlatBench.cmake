# The programs behind `lowlat bench` and `lowlat profile`: cpp_kernels/bench/measure_NAME.cu becomes
# lowlat/_bench/NAME in the wheel. Built where nvcc is found; elsewhere the commands say what is
# missing. The baseline arm is a Python file and travels always, and so does the layer on the
# platform scalar.
add_custom_target(lowlat_measures)
install(FILES ${CMAKE_CURRENT_SOURCE_DIR}/cpp_kernels/bench/baseline_layer.py
  DESTINATION lowlat/_bench)
if(LOWLAT_HAVE_KERNELS)
  add_executable(measure_layer_scalar
    ${CMAKE_CURRENT_SOURCE_DIR}/cpp_kernels/bench/measure_layer_scalar.cpp)
  target_link_libraries(measure_layer_scalar PRIVATE lowlat_kernels_inner)
  set_target_properties(measure_layer_scalar PROPERTIES
    OUTPUT_NAME layer_scalar RUNTIME_OUTPUT_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/bench)
  add_dependencies(lowlat_measures measure_layer_scalar)
  install(TARGETS measure_layer_scalar RUNTIME DESTINATION lowlat/_bench)
endif()
if(LOWLAT_HAVE_CUDA)
  file(GLOB _measures CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/cpp_kernels/bench/measure_*.cu)
  foreach(_source IN LISTS _measures)
    string(REGEX REPLACE ".*/measure_(.*)\\.cu$" "\\1" _name ${_source})
    add_executable(measure_${_name} ${_source})
    target_link_libraries(measure_${_name} PRIVATE lowlat_kernels_inner)
    set_target_properties(measure_${_name} PROPERTIES
      OUTPUT_NAME ${_name} RUNTIME_OUTPUT_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/bench)
    add_dependencies(lowlat_measures measure_${_name})
    install(TARGETS measure_${_name} RUNTIME DESTINATION lowlat/_bench)
  endforeach()
  # The layer once more with clock stamps in its kernels, for `lowlat profile`: its own kernels come
  # before those of the library.
  file(GLOB _fused CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/cpp_kernels/fused/*.cu)
  add_executable(measure_layer_stamps
    ${CMAKE_CURRENT_SOURCE_DIR}/cpp_kernels/bench/measure_layer.cu ${_fused})
  target_compile_definitions(measure_layer_stamps PRIVATE LOWLAT_STAMPS=1)
  target_link_libraries(measure_layer_stamps PRIVATE lowlat_kernels_inner)
  set_target_properties(measure_layer_stamps PROPERTIES
    OUTPUT_NAME layer_stamps RUNTIME_OUTPUT_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/bench)
  add_dependencies(lowlat_measures measure_layer_stamps)
  install(TARGETS measure_layer_stamps RUNTIME DESTINATION lowlat/_bench)
endif()
