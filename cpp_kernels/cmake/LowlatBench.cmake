# The programs behind `lowlat bench` and `lowlat profile`: cpp_kernels/bench/measure_NAME.cu becomes
# lowlat/_bench/NAME in the wheel. Built where nvcc is found; elsewhere the commands say what is
# missing. The baseline arm is a Python file and travels always.
add_custom_target(lowlat_measures)
install(FILES ${CMAKE_CURRENT_SOURCE_DIR}/cpp_kernels/bench/baseline_layer.py
  DESTINATION lowlat/_bench)
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
endif()
