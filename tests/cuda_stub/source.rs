//! Names and parameter sizes of the kernels, as C that a compiler sizes: the structs are copied out of the CUDA sources.

use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

/// C source with a function `all_kernels` that calls `kernel(name, bytes of the parameters)` for each kernel in `folder`.
pub(crate) fn sizes(folder: &Path) -> String {
    let files = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<_> = files.filter(|file| file.extension().is_some_and(|e| e == "cu")).collect();
    files.sort();
    let mut c = String::from(
        "typedef unsigned char u8;\ntypedef unsigned short u16;\ntypedef unsigned u32;\ntypedef unsigned long long u64;\n\
         typedef struct { float x, y; } float2;\ntypedef struct { float x, y, z, w; } float4;\n\
         typedef struct { u32 x, y; } uint2;\ntypedef struct { u32 x, y, z, w; } uint4;\n",
    );
    let mut calls = String::new();
    for (i, file) in files.iter().enumerate() {
        let source = with_headers(file, &mut Vec::new());
        writeln!(c, "static void kernels_{i}(void) {{\n{}", declarations(&source)).unwrap();
        for (name, params) in kernels(&source) {
            writeln!(c, "kernel(\"{name}\", sizeof({params}));").unwrap();
        }
        c.push_str("}\n");
        writeln!(calls, "kernels_{i}();").unwrap();
    }
    writeln!(c, "static void all_kernels(void) {{\n{calls}}}").unwrap();
    c
}

/// The text of `file` behind those of the headers that it includes, each once.
fn with_headers(file: &Path, seen: &mut Vec<PathBuf>) -> String {
    if seen.iter().any(|s| s == file) {
        return String::new();
    }
    seen.push(file.to_owned());
    let source = fs::read_to_string(file).unwrap();
    let included = source.lines().filter_map(|line| line.strip_prefix("#include \"")?.strip_suffix('"'));
    let headers: Vec<String> = included.map(|name| with_headers(&file.with_file_name(name), seen)).collect();
    headers.concat() + &source
}

/// Constants and the fields of structs that are no templates.
fn declarations(source: &str) -> String {
    let (mut c, mut after_template) = (String::new(), false);
    for (at, line) in source.lines().map(|line| (line.as_ptr() as usize - source.as_ptr() as usize, line)) {
        if let Some(rest) = line.strip_prefix("constexpr int ")
            && let Some((name, value)) = rest.split(';').next().unwrap().split_once(" = ")
            && value.chars().all(|c| c.is_ascii_digit())
        {
            writeln!(c, "enum {{ {name} = {value} }};").unwrap();
        }
        if let Some(name) = line.strip_prefix("struct ").and_then(|rest| rest.strip_suffix(" {"))
            && !after_template
        {
            let body: Vec<&str> = source[at..].lines().skip(1).take_while(|line| !line.starts_with('}')).collect();
            let fields = body.iter().take_while(|line| !line.contains("__device__") && !line.contains("static"));
            let fields: Vec<&str> = fields.map(|line| line.split("//").next().unwrap()).collect();
            if fields.iter().any(|field| field.contains(';')) {
                writeln!(c, "typedef struct {name} {name};\nstruct {name} {{\n{}\n}};", fields.join("\n")).unwrap();
            }
        }
        after_template = line.starts_with("template");
    }
    c
}

/// Names of the kernels, and their parameter structs.
fn kernels(source: &str) -> Vec<(&str, &str)> {
    let mut kernels = Vec::new();
    for (at, found) in source.match_indices("(const __grid_constant__ ") {
        let name = source[..at].rsplit(' ').next().unwrap();
        let params = source[at + found.len()..].split(' ').next().unwrap();
        if name != "name" {
            kernels.push((name, params));
            continue;
        }
        // a macro's: its uses
        let macro_name = source[..at].rsplit("#define ").next().unwrap().split('(').next().unwrap();
        for line in source.lines() {
            if let Some(arguments) = line.strip_prefix(macro_name).and_then(|rest| rest.strip_prefix('(')) {
                kernels.push((arguments.split(',').next().unwrap(), params));
            }
        }
    }
    assert!(!kernels.is_empty(), "no kernel found: is the pattern right?");
    kernels
}
