# CHECK=layout: what the header's structs and enums look like to a C compiler is what layout.txt says.
# CHECK=symbols: the shared library exports symbols.txt and nothing else, the static one no other name of ours that is not
# mangled, and neither needs a library beyond libc's.
#
# Lines may be appended to the files when the ABI grows; a line that changes or goes breaks programs. DSV4_UPDATE_ABI=1
# in the environment rewrites layout.txt.

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
