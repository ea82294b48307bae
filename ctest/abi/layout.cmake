# Writes a C program that prints the size of every struct of the header, the offset and size of every field, and the number
# of every enumerator. A new struct, field or enumerator is found here by itself; experimental ones are left out.

file(STRINGS "${HEADER}" lines)
set(body "")
set(struct "")
set(frozen TRUE)
foreach(line IN LISTS lines)
  if(line MATCHES "^#ifdef DSV4_EXPERIMENTAL")
    set(frozen FALSE)
  elseif(line MATCHES "^#endif // DSV4_EXPERIMENTAL")
    set(frozen TRUE)
  endif()
  if(line MATCHES "^ *//" OR NOT frozen)
    continue()
  endif()
  if(line MATCHES "^typedef struct (dsv4_[a-z_]+) {")
    set(struct ${CMAKE_MATCH_1})
    string(APPEND body "    printf(\"struct ${struct} size %zu\\n\", sizeof(${struct}));\n")
  elseif(line MATCHES "^}")
    set(struct "")
  elseif(struct AND line MATCHES "([a-z_0-9]+)(\\[[A-Z_0-9]+\\])?;$")
    set(field ${CMAKE_MATCH_1})
    string(APPEND body "    printf(\"struct ${struct} .${field} at %zu size %zu\\n\", offsetof(${struct}, ${field}), "
      "sizeof(((${struct} *)0)->${field}));\n")
  elseif(line MATCHES "^ +(DSV4_[A-Z0-9_]+) = ")
    string(APPEND body "    printf(\"enum ${CMAKE_MATCH_1} %d\\n\", (int)${CMAKE_MATCH_1});\n")
  endif()
endforeach()
file(WRITE "${OUTPUT}"
  "#include <dsv4.h>\n#include <stdio.h>\n\nint main(void)\n{\n"
  "    printf(\"sizes of dsv4_status: %zu, pointers: %zu\\n\", sizeof(dsv4_status), sizeof(void *));\n"
  "${body}    return 0;\n}\n")
