# Writes a C++ program that defines every function of the header, for abidw: the compiler's description of its types is the
# ABI as callers see it. (The library's own would take a build with all of Rust's debugging information.)

file(READ "${HEADER}" text)
string(REGEX REPLACE "//[^\n]*" "" text "${text}")
string(REGEX MATCHALL "\nDSV4_API [^;#]+\\)" functions "${text}")
set(body "")
foreach(function IN LISTS functions)
  string(REGEX REPLACE "DSV4_API|DSV4_NODISCARD" "" function "${function}")
  string(APPEND body "${function}\n{\n    __builtin_trap();\n}\n")
endforeach()
file(WRITE "${OUTPUT}" "#include <dsv4.h>\n\nextern \"C\" {\n${body}}\n")
