# lowlat._dispatch (PyO3, stable ABI, so it needs no Python.h) and the engine's lowlat-engine.
find_program(LOWLAT_CARGO cargo HINTS $ENV{HOME}/.cargo/bin)
if(NOT LOWLAT_CARGO)
  message(FATAL_ERROR "no cargo: lowlat._dispatch and lowlat-engine need Rust 1.85 or newer")
endif()
find_package(Python 3.10 REQUIRED COMPONENTS Interpreter)
set(LOWLAT_CARGO_TARGET_DIR ${CMAKE_CURRENT_BINARY_DIR}/cargo CACHE PATH "cargo's target folder")
set(_release ${LOWLAT_CARGO_TARGET_DIR}/release)
# The target folder may be shared between clones, so the results are copied out of it at once.
set(_rust_out ${CMAKE_CURRENT_BINARY_DIR}/rust)
add_custom_target(lowlat_rust ALL USES_TERMINAL VERBATIM
  WORKING_DIRECTORY ${CMAKE_CURRENT_SOURCE_DIR}
  BYPRODUCTS ${_rust_out}/_dispatch.abi3.so ${_rust_out}/lowlat-engine
  COMMAND ${CMAKE_COMMAND} -E env PYO3_PYTHON=${Python_EXECUTABLE} PYO3_BUILD_EXTENSION_MODULE=1
    ${LOWLAT_CARGO} build --release --locked -p lowlat-py --features python --lib
    --target-dir ${LOWLAT_CARGO_TARGET_DIR}
  COMMAND ${LOWLAT_CARGO} build --release --locked -p lowlat-engine --bin lowlat-engine
    --target-dir ${LOWLAT_CARGO_TARGET_DIR}
  COMMAND ${CMAKE_COMMAND} -E make_directory ${_rust_out}
  COMMAND ${CMAKE_COMMAND} -E copy_if_different
    ${_release}/liblowlat_dispatch.so ${_rust_out}/_dispatch.abi3.so
  COMMAND ${CMAKE_COMMAND} -E copy_if_different
    ${_release}/lowlat-engine ${_rust_out}/lowlat-engine)
install(FILES ${_rust_out}/_dispatch.abi3.so DESTINATION lowlat)
install(PROGRAMS ${_rust_out}/lowlat-engine DESTINATION lowlat/_bin)
