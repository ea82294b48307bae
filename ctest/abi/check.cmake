# CHECK=layout: what the header's structs and enums look like to a C compiler is what layout.txt says.
# CHECK=symbols: the shared library exports symbols.txt and nothing else, the static one no other name of ours that is not
# mangled, and neither needs a library beyond libc's.
# CHECK=grown: all that the first header promised is still so: layout and declarations.
# CHECK=called: the program of the first header calls every function that the header has.
# CHECK=types: types and signatures are those of dsv4.abi, but for functions that were added.
#
# Lines may be appended to the files when the ABI grows; a line that changes or goes breaks programs. DSV4_UPDATE_ABI=1
# in the environment rewrites layout.txt and dsv4.abi.

cmake_minimum_required(VERSION 3.18)
include("${ABI}/grown.cmake")

function(compare name is should)
  if(NOT is STREQUAL should)
    file(WRITE "${CMAKE_CURRENT_BINARY_DIR}/${name}.is" "${is}")
    message(FATAL_ERROR "${name} differs: compare ${CMAKE_CURRENT_BINARY_DIR}/${name}.is with ${ABI}/${name}.txt")
  endif()
endfunction()

if(CHECK STREQUAL "layout")
  execute_process(COMMAND "${LAYOUT}" OUTPUT_VARIABLE is COMMAND_ERROR_IS_FATAL ANY)
  if(DEFINED ENV{DSV4_UPDATE_ABI})
    file(WRITE "${ABI}/layout.txt" "${is}")
  endif()
  file(READ "${ABI}/layout.txt" should)
  compare(layout "${is}" "${should}")
  return()
endif()

if(CHECK STREQUAL "grown")
  execute_process(COMMAND "${FIRST_LAYOUT}" OUTPUT_VARIABLE old COMMAND_ERROR_IS_FATAL ANY)
  execute_process(COMMAND "${LAYOUT}" OUTPUT_VARIABLE new COMMAND_ERROR_IS_FATAL ANY)
  broken_promises("${old}" "${new}" broken)
  file(READ "${FIRST}" old)
  file(READ "${HEADER}" new)
  broken_declarations("${old}" "${new}" gone)
  list(APPEND broken ${gone})
  if(broken)
    list(JOIN broken "\n  " broken)
    message(FATAL_ERROR "programs of the first header rely on\n  ${broken}")
  endif()
  return()
endif()

if(CHECK STREQUAL "called")
  file(READ "${FIRST}" header)
  declarations("${header}" functions)
  list(TRANSFORM functions REPLACE ".*(dsv4_[a-z_0-9]+)\\(.*" "\\1")
  execute_process(COMMAND nm -D --undefined-only --format=posix "${PROGRAM}" OUTPUT_VARIABLE calls COMMAND_ERROR_IS_FATAL ANY)
  list(LENGTH functions count)
  foreach(function IN LISTS functions)
    if(NOT "\n${calls}" MATCHES "\n${function} ")
      message(FATAL_ERROR "first/program.c does not call ${function}")
    endif()
  endforeach()
  if(count LESS 50)
    message(FATAL_ERROR "only ${count} functions were found in the first header")
  endif()
  return()
endif()

if(CHECK STREQUAL "types")
  if(DEFINED ENV{DSV4_UPDATE_ABI})
    execute_process(COMMAND "${ABIDW}" --no-corpus-path --no-comp-dir-path --no-show-locs --out-file "${ABI}/dsv4.abi" "${TODAY}"
      COMMAND_ERROR_IS_FATAL ANY)
    # where it was built is nobody's business
    file(READ "${ABI}/dsv4.abi" written)
    string(REGEX REPLACE "path='[^']*/stub\\.cpp'" "path='stub.cpp'" written "${written}")
    file(WRITE "${ABI}/dsv4.abi" "${written}")
  endif()
  execute_process(COMMAND "${ABIDIFF}" --no-added-syms "${ABI}/dsv4.abi" "${TODAY}"
    RESULT_VARIABLE code OUTPUT_VARIABLE words ERROR_VARIABLE words)
  if(NOT code EQUAL 0)
    message(FATAL_ERROR "types or signatures differ from dsv4.abi (abidiff ${code}):\n${words}")
  endif()
  return()
endif()

file(READ "${ABI}/symbols.txt" should)
execute_process(COMMAND nm -D --defined-only --format=posix "${SHARED}" OUTPUT_VARIABLE table COMMAND_ERROR_IS_FATAL ANY)
string(REGEX MATCHALL "[^\n]+" table "${table}")
list(TRANSFORM table REPLACE " .*" "")
list(SORT table)
list(JOIN table "\n" is)
compare(symbols "${is}\n" "${should}")

execute_process(COMMAND nm -g --defined-only --format=posix "${STATIC}" OUTPUT_VARIABLE table ERROR_QUIET)
string(REGEX MATCHALL "(^|\n)[^\n ]*dsv4[^\n ]* [A-Z]" table "${table}")
list(TRANSFORM table STRIP)
list(TRANSFORM table REPLACE " .*" "")
# mangled names begin so in either scheme
list(FILTER table EXCLUDE REGEX "^(_ZN|_R)")
list(SORT table)
list(REMOVE_DUPLICATES table)
list(JOIN table "\n" is)
compare(symbols "${is}\n" "${should}")

execute_process(COMMAND readelf -d "${SHARED}" OUTPUT_VARIABLE dynamic COMMAND_ERROR_IS_FATAL ANY)
string(REGEX MATCHALL "NEEDED[^[]*\\[[^]]+" needed "${dynamic}")
list(TRANSFORM needed REPLACE ".*\\[" "")
foreach(library IN LISTS needed)
  if(NOT library MATCHES "^(libc|libm|libgcc_s|libpthread|libdl|librt|ld-linux[-a-z0-9_]*)\\.so")
    message(FATAL_ERROR "the shared library needs ${library}")
  endif()
endforeach()
if(NOT dynamic MATCHES "SONAME[^[]*\\[libdsv4\\.so\\.[0-9.]+\\]")
  message(FATAL_ERROR "the shared library has no soname with a version")
endif()
