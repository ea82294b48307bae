# What may change in the ABI: lines may be added to a layout, as layout.cmake's programs print it, and structs may become
# larger; functions may be added.

# Sets `result` to the lines of `old` that `new` breaks.
function(broken_promises old new result)
  string(REGEX MATCHALL "[^\n]+" old "${old}")
  string(REGEX MATCHALL "[^\n]+" new "${new}")
  set(broken "")
  foreach(line IN LISTS old)
    if(line IN_LIST new)
      continue()
    endif()
    if(line MATCHES "^(struct [a-z_0-9]+ size) ([0-9]+)$")
      set(before ${CMAKE_MATCH_2})
      set(now "${new}")
      list(FILTER now INCLUDE REGEX "^${CMAKE_MATCH_1} [0-9]+$")
      string(REGEX REPLACE ".* " "" now "${now}")
      if(now AND NOT now LESS before)
        continue()
      endif()
    endif()
    list(APPEND broken "${line}")
  endforeach()
  set(${result} "${broken}" PARENT_SCOPE)
endfunction()

# The declarations of a header's functions, in one line each, without the names of their parameters.
function(declarations header result)
  string(REGEX REPLACE "//[^\n]*" "" header "${header}")
  string(REGEX REPLACE "[ \n]+" " " header "${header}")
  string(REGEX MATCHALL "DSV4_API (DSV4_NODISCARD )?[a-z][a-z_0-9 *]*\\([^;#]*\\)" functions "${header}")
  list(TRANSFORM functions REPLACE "[a-z_0-9]+([,)])" "\\1")
  set(${result} "${functions}" PARENT_SCOPE)
endfunction()

# Sets `result` to the declarations of the header `old` that the header `new` lacks.
function(broken_declarations old new result)
  declarations("${old}" before)
  declarations("${new}" now)
  set(broken "${before}")
  list(REMOVE_ITEM broken ${now})
  set(${result} "${broken}" PARENT_SCOPE)
endfunction()
