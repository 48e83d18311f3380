# Every tests/cpp/**/test_*.cpp becomes one program and one ctest of its path below tests/cpp,
# without "test_" and the ending: stages/test_norm.cpp is stages/norm.
#
# test_*_tsan.cpp is built with ThreadSanitizer and linked with nothing of ours: it covers what it
# includes. When it holds the marker LOWLAT_PLANT, a second build with -DLOWLAT_PLANT=1 must be
# caught by the sanitizer: <name>_planted.
#
# A test of the platform emu that names LOWLAT_EMU_WARP_LANES is built a second time for warps of 64
# lanes: <name>_64.
#
# Where cargo is found: tests/cpp/capi_*.c and .cpp are programs over the dispatcher's C face, the
# example engine is built and run (example/*), and the engine's Rust tests run with the kernel
# library that was built here (label "rust").
set(_tests_dir ${CMAKE_CURRENT_SOURCE_DIR}/tests/cpp)
# No test may hang. ThreadSanitizer makes its programs about ten times slower; a build of everything
# under a sanitizer runs at the lowest priority besides (make test-deep).
set(_budget_s 300)
if(CMAKE_CXX_FLAGS MATCHES "-fsanitize=")
  set(_budget_s 1800)
endif()

# ThreadSanitizer needs its address ranges free; `setarch -R` turns the randomisation off that may
# take them. Both may be missing in a container, so a program is built and run to see.
find_program(LOWLAT_SETARCH setarch)
if(NOT DEFINED LOWLAT_TSAN_RUN)
  set(_probe ${CMAKE_CURRENT_BINARY_DIR}/tsan_probe)
  file(WRITE ${_probe}.cpp "int main() { return 0; }\n")
  execute_process(COMMAND ${CMAKE_CXX_COMPILER} -fsanitize=thread ${_probe}.cpp -o ${_probe}
    RESULT_VARIABLE _built OUTPUT_QUIET ERROR_QUIET)
  set(_run NONE)
  if(_built EQUAL 0)
    if(LOWLAT_SETARCH)
      execute_process(COMMAND ${LOWLAT_SETARCH} ${CMAKE_HOST_SYSTEM_PROCESSOR} -R ${_probe}
        RESULT_VARIABLE _ran OUTPUT_QUIET ERROR_QUIET TIMEOUT 20)
      if(_ran EQUAL 0)
        set(_run ${LOWLAT_SETARCH} ${CMAKE_HOST_SYSTEM_PROCESSOR} -R)
      endif()
    endif()
    if(_run STREQUAL "NONE")
      execute_process(COMMAND ${_probe} RESULT_VARIABLE _ran OUTPUT_QUIET ERROR_QUIET TIMEOUT 20)
      if(_ran EQUAL 0)
        set(_run env)
      endif()
    endif()
  endif()
  set(LOWLAT_TSAN_RUN "${_run}" CACHE INTERNAL "what runs a ThreadSanitizer program, or NONE")
endif()
if(LOWLAT_TSAN_RUN STREQUAL "NONE")
  message(STATUS "ThreadSanitizer programs do not run here: their tests are disabled")
endif()

function(lowlat_test_program target name source)
  add_executable(${target} ${source})
  target_include_directories(${target} PRIVATE ${_tests_dir} ${CMAKE_CURRENT_SOURCE_DIR})
  target_compile_definitions(${target} PRIVATE LOWLAT_TEST_NAME="${name}"
    LOWLAT_SOURCE_DIR="${CMAKE_CURRENT_SOURCE_DIR}")
  target_link_libraries(${target} PRIVATE lowlat_flags)
endfunction()

file(GLOB_RECURSE _test_sources CONFIGURE_DEPENDS RELATIVE ${_tests_dir} ${_tests_dir}/test_*.cpp)
foreach(_source IN LISTS _test_sources)
  string(REGEX REPLACE "(^|/)test_([^/]*)\\.cpp$" "\\1\\2" _name ${_source})
  string(REPLACE "/" "_" _target test_${_name})
  if(_name MATCHES "_tsan$" AND CMAKE_CXX_FLAGS MATCHES "-fsanitize=")
    continue()  # no program takes two sanitizers; the build without them has these tests
  endif()
  if(_name MATCHES "_tsan$")
    set(_variants plain)
    file(STRINGS ${_tests_dir}/${_source} _plant REGEX "LOWLAT_PLANT")
    if(_plant)
      list(APPEND _variants planted)
    endif()
    foreach(_variant IN LISTS _variants)
      if(_variant STREQUAL "planted")
        set(_suffix _planted)
        set(_expect ${CMAKE_CURRENT_SOURCE_DIR}/tests/tools/expect_race.sh)
      else()
        set(_suffix "")
        set(_expect "")
      endif()
      lowlat_test_program(${_target}${_suffix} ${_name}${_suffix} ${_tests_dir}/${_source})
      target_compile_options(${_target}${_suffix} PRIVATE -fsanitize=thread -O1 -g)
      target_link_options(${_target}${_suffix} PRIVATE -fsanitize=thread)
      if(_suffix)
        target_compile_definitions(${_target}${_suffix} PRIVATE LOWLAT_PLANT=1)
      endif()
      add_test(NAME ${_name}${_suffix}
        COMMAND ${_expect} ${LOWLAT_TSAN_RUN} $<TARGET_FILE:${_target}${_suffix}>)
      set_tests_properties(${_name}${_suffix} PROPERTIES SKIP_RETURN_CODE 77 TIMEOUT ${_budget_s}
        ENVIRONMENT "TSAN_OPTIONS=exitcode=66")
      if(LOWLAT_TSAN_RUN STREQUAL "NONE")
        set_tests_properties(${_name}${_suffix} PROPERTIES DISABLED TRUE)
      endif()
    endforeach()
  else()
    set(_suffixes "-")
    file(STRINGS ${_tests_dir}/${_source} _lanes REGEX "LOWLAT_EMU_WARP_LANES")
    if(_lanes)
      list(APPEND _suffixes _64)
    endif()
    foreach(_suffix IN LISTS _suffixes)
      string(REPLACE "-" "" _suffix ${_suffix})
      lowlat_test_program(${_target}${_suffix} ${_name}${_suffix} ${_tests_dir}/${_source})
      if(_suffix)
        target_compile_definitions(${_target}${_suffix} PRIVATE LOWLAT_EMU_WARP_LANES=64)
      endif()
      if(LOWLAT_HAVE_KERNELS)
        target_link_libraries(${_target}${_suffix} PRIVATE lowlat_kernels_inner)
      endif()
      add_test(NAME ${_name}${_suffix} COMMAND ${_target}${_suffix})
      set_tests_properties(${_name}${_suffix} PROPERTIES
        SKIP_RETURN_CODE 77 TIMEOUT ${_budget_s})
    endforeach()
  endif()
endforeach()

# The platform amd's host side, over a HIP runtime of our own.
if(TARGET test_host_amd_model)
  add_library(fake_hip SHARED ${CMAKE_CURRENT_SOURCE_DIR}/tests/fakes/hip_runtime.cpp)
  target_link_libraries(fake_hip PRIVATE lowlat_flags)
  set_target_properties(fake_hip PROPERTIES OUTPUT_NAME amdhip64 SOVERSION 7
    LIBRARY_OUTPUT_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/fakes
    CXX_VISIBILITY_PRESET default)
  add_dependencies(test_host_amd_model fake_hip)
  set_tests_properties(host/amd_model PROPERTIES
    ENVIRONMENT "LD_LIBRARY_PATH=${CMAKE_CURRENT_BINARY_DIR}/fakes")
endif()

# What an owner of an AMD GPU runs, up to the line that says that there is none.
if(TARGET test_host_amd_gpu)
  add_test(NAME host/amd_report
    COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/tests/tools/amd_report.sh
      --built ${CMAKE_CURRENT_BINARY_DIR}
    WORKING_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR})
  set_tests_properties(host/amd_report PROPERTIES TIMEOUT 1900
    PASS_REGULAR_EXPRESSION "nothing ran on an AMD GPU|run 3 of 3")
endif()

# ---------------------------------------------------------------------------------- with a GPU
# Where nvcc is found: every tests/gpu/test_*.cu becomes a program and a ctest (label "gpu") that
# is skipped without a device, and every cpp_kernels/bench/*.cu a program bench_*.
if(LOWLAT_HAVE_CUDA)
  file(GLOB _gpu_tests CONFIGURE_DEPENDS RELATIVE ${CMAKE_CURRENT_SOURCE_DIR}/tests/gpu
    ${CMAKE_CURRENT_SOURCE_DIR}/tests/gpu/test_*.cu)
  foreach(_source IN LISTS _gpu_tests)
    string(REGEX REPLACE "^test_(.*)\\.cu$" "\\1" _name ${_source})
    lowlat_test_program(gpu_${_name} gpu/${_name}
      ${CMAKE_CURRENT_SOURCE_DIR}/tests/gpu/${_source})
    target_link_libraries(gpu_${_name} PRIVATE lowlat_kernels_inner)
    add_test(NAME gpu/${_name} COMMAND gpu_${_name})
    set_tests_properties(gpu/${_name} PROPERTIES SKIP_RETURN_CODE 77 TIMEOUT ${_budget_s}
      LABELS gpu)
  endforeach()
  file(GLOB _benches CONFIGURE_DEPENDS RELATIVE ${CMAKE_CURRENT_SOURCE_DIR}/cpp_kernels/bench
    ${CMAKE_CURRENT_SOURCE_DIR}/cpp_kernels/bench/*.cu)
  foreach(_source IN LISTS _benches)
    string(REGEX REPLACE "\\.cu$" "" _name ${_source})
    if(_name MATCHES "^measure_")
      continue()  # LowlatBench.cmake builds these
    endif()
    add_executable(bench_${_name} ${CMAKE_CURRENT_SOURCE_DIR}/cpp_kernels/bench/${_source})
    target_link_libraries(bench_${_name} PRIVATE lowlat_kernels_inner)
  endforeach()
  # Its own resident kernels, with clock stamps in their hand-offs, come before the library's.
  target_sources(bench_resident_stages
    PRIVATE ${CMAKE_CURRENT_SOURCE_DIR}/cpp_kernels/host/nvidia/step.cu)
  target_compile_definitions(bench_resident_stages PRIVATE LOWLAT_STAMPS=1)
endif()

# ---------------------------------------------------------------------------------- with cargo
find_program(LOWLAT_CARGO cargo HINTS $ENV{HOME}/.cargo/bin)
set(LOWLAT_CARGO_TARGET_DIR ${CMAKE_CURRENT_BINARY_DIR}/cargo CACHE PATH "cargo's target folder")
if(LOWLAT_CARGO)
  file(GLOB _capi_tests CONFIGURE_DEPENDS RELATIVE ${_tests_dir}
    ${_tests_dir}/capi_*.c ${_tests_dir}/capi_*.cpp)
  if(_capi_tests)
    set(_capi ${LOWLAT_CARGO_TARGET_DIR}/debug/liblowlat_capi.a)
    add_custom_target(lowlat_capi USES_TERMINAL VERBATIM BYPRODUCTS ${_capi}
      WORKING_DIRECTORY ${CMAKE_CURRENT_SOURCE_DIR}
      COMMAND ${LOWLAT_CARGO} build --locked -p lowlat-capi --lib
        --target-dir ${LOWLAT_CARGO_TARGET_DIR})
  endif()
  foreach(_source IN LISTS _capi_tests)
    string(REGEX REPLACE "\\.c(pp)?$" "" _name ${_source})
    lowlat_test_program(${_name} ${_name} ${_tests_dir}/${_source})
    add_dependencies(${_name} lowlat_capi)
    target_include_directories(${_name} PRIVATE
      ${CMAKE_CURRENT_SOURCE_DIR}/rust_dispatch/capi/include)
    target_link_libraries(${_name} PRIVATE ${_capi} ${CMAKE_DL_LIBS} m)
    add_test(NAME ${_name} COMMAND ${_name})
    set_tests_properties(${_name} PROPERTIES TIMEOUT ${_budget_s})
  endforeach()
  # The example engine, and what it must print, alone and when a rank is killed.
  lowlat_test_program(example_engine example/engine
    ${CMAKE_CURRENT_SOURCE_DIR}/examples/engine_cpp/engine.cpp)
  add_dependencies(example_engine lowlat_capi)
  target_include_directories(example_engine PRIVATE
    ${CMAKE_CURRENT_SOURCE_DIR}/rust_dispatch/capi/include)
  target_link_libraries(example_engine PRIVATE ${_capi} ${CMAKE_DL_LIBS} m)
  set(_steps "32 steps by graphs, 8 by its own forward")
  set(_end "\n40 steps, every result right\n$")
  add_test(NAME example/engine COMMAND example_engine)
  set_tests_properties(example/engine PROPERTIES TIMEOUT ${_budget_s} PASS_REGULAR_EXPRESSION
    "^rank 0: ${_steps}, 1 groups\nrank 1: ${_steps}, 1 groups${_end}")
  foreach(_wrong "--song;1" "--ranks;9" "--ranks")
    string(REPLACE ";" "" _name "example/engine_refuses${_wrong}")
    add_test(NAME ${_name} COMMAND example_engine ${_wrong})
    set_tests_properties(${_name} PROPERTIES TIMEOUT ${_budget_s}
      PASS_REGULAR_EXPRESSION "^usage: engine ")
  endforeach()
  add_test(NAME example/engine_killed COMMAND example_engine --ranks 3 --kill 17)
  string(CONCAT _killed "^rank 2 was killed and is started again\n"
    "rank 0 saw: .401. rank 2 did not answer the vote of epoch 18 by the deadline\n"
    "rank 0: ${_steps}, 2 groups\nrank 1: ${_steps}, 2 groups\nrank 2: ${_steps}, 2 groups${_end}")
  set_tests_properties(example/engine_killed PROPERTIES
    TIMEOUT ${_budget_s} PASS_REGULAR_EXPRESSION "${_killed}")
  if(LOWLAT_HAVE_KERNELS)
    add_test(NAME rust/engine WORKING_DIRECTORY ${CMAKE_CURRENT_SOURCE_DIR}
      COMMAND ${CMAKE_COMMAND} -E env LOWLAT_KERNELS=$<TARGET_FILE:lowlat_kernels>
        CARGO_TARGET_DIR=${LOWLAT_CARGO_TARGET_DIR}
        ${LOWLAT_CARGO} test --locked -p lowlat-engine)
    set_tests_properties(rust/engine PROPERTIES LABELS rust TIMEOUT 1800)
  endif()
else()
  message(STATUS "no cargo: the tests of the dispatcher's C face and of the engine are left out")
endif()
