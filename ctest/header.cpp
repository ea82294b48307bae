// The same in C++.

#include "header.c"
