# Shows that the comparisons can fail: makes changes to copies of the header, compatible and incompatible ones, and asks
# what they say to each.

cmake_minimum_required(VERSION 3.18)
include("${ABI}/grown.cmake")
file(READ "${HEADER}" header)

# The layout of a header, and with ABIDIFF a shared object that abidiff can read.
function(compile name text layout)
  set(dir "${WORK}/${name}")
  file(MAKE_DIRECTORY "${dir}")
  file(WRITE "${dir}/dsv4.h" "${text}")
  execute_process(COMMAND ${CMAKE_COMMAND} -DHEADER=${dir}/dsv4.h -DOUTPUT=${dir}/layout.c -P "${ABI}/layout.cmake"
    COMMAND_ERROR_IS_FATAL ANY)
  execute_process(COMMAND "${CC}" -I "${dir}" -o "${dir}/layout" "${dir}/layout.c" COMMAND_ERROR_IS_FATAL ANY)
  execute_process(COMMAND "${dir}/layout" OUTPUT_VARIABLE printed COMMAND_ERROR_IS_FATAL ANY)
  set(${layout} "${printed}" PARENT_SCOPE)
  if(ABIDIFF)
    execute_process(COMMAND ${CMAKE_COMMAND} -DHEADER=${dir}/dsv4.h -DOUTPUT=${dir}/stub.cpp -P "${ABI}/stub.cmake"
      COMMAND_ERROR_IS_FATAL ANY)
    execute_process(COMMAND "${CXX}" -std=c++17 -g -shared -fPIC -I "${dir}" -o "${dir}/stub.so" "${dir}/stub.cpp"
      COMMAND_ERROR_IS_FATAL ANY)
  endif()
endfunction()

compile(unchanged "${header}" today)

# Replaces `from`, which must be there, by `to`. `wanted` is what the comparisons should say: whether what was promised to
# old programs holds, and whether abidiff finds a difference.
function(change name wanted from to)
  string(REPLACE "${from}" "${to}" changed "${header}")
  if(changed STREQUAL header)
    message(FATAL_ERROR "${name}: the header has no \"${from}\": name another place for this change")
  endif()
  compile(${name} "${changed}" now)
  broken_promises("${today}" "${now}" broken)
  broken_declarations("${header}" "${changed}" gone)
  set(found holds)
  if(broken OR gone)
    set(found broken)
  endif()
  if(ABIDIFF)
    execute_process(COMMAND "${ABIDIFF}" --no-added-syms "${WORK}/unchanged/stub.so" "${WORK}/${name}/stub.so"
      RESULT_VARIABLE code OUTPUT_VARIABLE words)
    if(code EQUAL 0)
      string(APPEND found ", same types")
    else()
      string(APPEND found ", other types")
    endif()
  else()
    string(REGEX REPLACE ",.*" "" wanted "${wanted}")
  endif()
  if(NOT found STREQUAL wanted)
    message(FATAL_ERROR "${name}: ${found}, not ${wanted}; broken: ${broken} ${gone}; ${words}")
  endif()
endfunction()

# the struct whose fields change places
string(FIND "${header}" "typedef struct dsv4_engine_options {" begin)
string(FIND "${header}" "} dsv4_engine_options;" end)
math(EXPR length "${end} - ${begin}")
string(SUBSTRING "${header}" ${begin} ${length} options)
string(REPLACE " threads;" " first;" swapped "${options}")
string(REPLACE " prefill_chunk;" " threads;" swapped "${swapped}")
string(REPLACE " first;" " prefill_chunk;" swapped "${swapped}")
string(REPLACE " threads;" " threads;\n    uint64_t added;" inserted "${options}")

change(a_field_at_the_end "holds, other types" "} dsv4_engine_options;" "    uint64_t added;\n} dsv4_engine_options;")
change(a_new_enumerator "holds, same types" "    DSV4_STATUS_IO = 3,\n" "    DSV4_STATUS_IO = 3,\n    DSV4_STATUS_NEW = 1000,\n")
change(a_new_function "holds, same types" "DSV4_API void dsv4_engine_free" "DSV4_API void dsv4_new(void);\n\nDSV4_API void dsv4_engine_free")
change(fields_that_change_places "broken, other types" "${options}" "${swapped}")
string(CONCAT experiment "#ifdef DSV4_EXPERIMENTAL\ntypedef struct dsv4_new {\n    size_t size;\n} dsv4_new;\n\n"
  "DSV4_API void dsv4_try(dsv4_new *what);\n#endif // DSV4_EXPERIMENTAL\n\n")
set(free "DSV4_API void dsv4_engine_free(dsv4_engine *engine);\n")
change(an_experimental_part "holds, same types" "${free}" "${experiment}${free}")
string(REPLACE "new" "other" another "${experiment}")
string(REPLACE "dsv4_try" "dsv4_try_other" another "${another}")
change(what_lies_between_experiments "broken, other types" "${free}" "${experiment}${another}")
change(experiments_around_it "holds, same types" "${free}" "${experiment}${free}${another}")
change(a_field_in_the_middle "broken, other types" "${options}" "${inserted}")
change(a_field_that_goes "broken, other types" "    uint32_t num_attention_heads;\n" "")
change(a_wider_field "broken, other types" "    uint32_t threads;\n" "    uint64_t threads;\n")
change(a_shorter_array "broken, other types" "DSV4_ERROR_MESSAGE_SIZE 1000" "DSV4_ERROR_MESSAGE_SIZE 900")
change(a_number_that_changes "broken, other types" "    DSV4_STATUS_IO = 3,\n" "    DSV4_STATUS_IO = 1003,\n")
change(another_parameter "broken, other types" "uint32_t dsv4_version_number(void)" "uint32_t dsv4_version_number(int part)")
