module examples

go 1.24

require dsv4 v0.0.0

// where the module is installed: PREFIX/share/dsv4/go, or this checkout's
replace dsv4 => ../../bindings/go
